"""What a corpus reads, how it splits, what it writes down, and what it refuses."""

import hashlib
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from needlework.data import CorpusConfig, byte_tokenizer, decode_bytes, load_corpus

LINES = "".join(f"{n} bottles of beer on the wall\n" for n in range(100))


def load(*paths, **settings):
    return load_corpus(CorpusConfig(kind="files", paths=paths, **settings), byte_tokenizer())


def texts(documents):
    return [decode_bytes(documents[i]).decode() for i in range(len(documents))]


def everything(corpus):
    return sorted(texts(corpus.train) + texts(corpus.held_out))


def parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)


def test_no_held_out_document_is_in_training(corpus, folder):
    train, held_out = texts(corpus.train), texts(corpus.held_out)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(path.read_text() for path in folder.iterdir())
    named = [(folder / name).read_text() for name in corpus.manifest["split"]["held_out"]]
    assert sorted(named) == sorted(held_out)
    assert corpus.manifest["split"]["by"] == "name"


def test_a_file_stays_on_its_side_as_others_come(corpus, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "new.txt").write_text(LINES)
    more = load(tmp_path, held_out=0.2)
    assert set(texts(corpus.train)) <= set(texts(more.train))
    assert set(texts(corpus.held_out)) <= set(texts(more.held_out))


def test_every_document_ends_in_end_of_text(corpus):
    ends = corpus.train.tokens[corpus.train.offsets[1:] - 1]
    assert (ends == 256).all()
    assert (corpus.train.tokens == 256).sum() == len(corpus.train)


def test_the_same_files_give_the_same_corpus(corpus, folder):
    again = load(folder, held_out=0.2)
    assert again.manifest == corpus.manifest
    np.testing.assert_array_equal(again.train.tokens, corpus.train.tokens)


def test_the_manifest_lists_every_file_with_bytes_and_hash(corpus, folder, tmp_path):
    corpus.write_manifest(tmp_path / "manifest.json")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == corpus.manifest
    for entry in manifest["files"]:
        data = (folder / entry["name"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    totals = manifest["totals"]
    assert totals["files"] == totals["documents"] == len(list(folder.iterdir()))
    assert totals["bytes"] == sum(entry["bytes"] for entry in manifest["files"])
    assert totals["train_tokens"] + totals["held_out_tokens"] == totals["bytes"] + totals["documents"]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(corpus, tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        corpus.write_manifest(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_the_standard_library_is_read_up_to_the_cap_without_packages_and_tests():
    corpus = load_corpus(CorpusConfig(max_bytes=1 << 18), byte_tokenizer())
    root = Path(sysconfig.get_path("stdlib"))
    for entry in corpus.manifest["files"]:
        assert (root / entry["name"]).stat().st_size == entry["bytes"]
        assert not {"site-packages", "test", "tests", "idle_test"} & set(Path(entry["name"]).parts)
    assert (1 << 18) - 4 < corpus.manifest["totals"]["bytes"] <= 1 << 18
    assert corpus.manifest["totals"]["files_left_unread"] > 0
    assert len(corpus.held_out.tokens) > 0


@pytest.mark.parametrize("room", range(1, 12))
def test_the_cap_never_cuts_a_character(tmp_path, room):
    (tmp_path / "a.txt").write_text("äöü🪡x")
    corpus = load(tmp_path, max_bytes=room + 1)
    text = (corpus.train.tokens.tolist() + corpus.held_out.tokens.tolist())[:-1]
    assert "äöü🪡x".startswith(bytes(text).decode())


def test_one_file_gives_its_end_as_held_out_text(tmp_path):
    (tmp_path / "book.txt").write_text(LINES)
    corpus = load(tmp_path / "book.txt")
    assert texts(corpus.train)[0] + texts(corpus.held_out)[0] == LINES
    assert corpus.manifest["split"]["by"] == "end of the longest document"
    assert corpus.manifest["split"]["from_token"] == len(corpus.train.tokens)


def test_jsonl_json_and_parquet_records_are_documents(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    (tmp_path / "b.json").write_text('[{"text": "three"}, {"text": "four"}]')
    (tmp_path / "c.json").write_text('{"text": "five"}\n{"text": "six"}\n')
    parquet(tmp_path / "d.parquet", text=["seven", "eight"], id=[7, 8])
    (tmp_path / "e.md").write_text("nine" * 30)
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    corpus = load(tmp_path)
    assert set(numbers) <= set(everything(corpus))
    assert {entry["name"]: entry["documents"] for entry in corpus.manifest["files"]} == {
        "a.jsonl": 2,
        "b.json": 2,
        "c.json": 2,
        "d.parquet": 2,
        "e.md": 1,
    }


def test_empty_and_repeated_documents_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in ("same", "same", "", "other words")))
    corpus = load(tmp_path, tmp_path / "a.jsonl")
    assert "".join(everything(corpus)).count("same") == 1
    assert corpus.manifest["totals"]["documents"] == 2
    assert corpus.manifest["totals"]["files"] == 1


def test_what_is_no_text_is_skipped_and_listed(tmp_path):
    (tmp_path / "good.txt").write_text(LINES)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "settings.json").write_text('{"indent": 4}')
    (tmp_path / ".hidden").write_text("not seen")
    skipped = {entry["name"]: entry["reason"] for entry in load(tmp_path).manifest["skipped"]}
    assert sorted(skipped) == ["image.png", "latin.txt", "settings.json"]
    assert "NUL" in skipped["image.png"]
    assert "not UTF-8" in skipped["latin.txt"]
    assert "fields present: indent" in skipped["settings.json"]


def test_a_corpus_with_no_readable_text_names_what_was_tried(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ValueError, match=r"(?s)no readable text in .*; tried 1 files.*image\.png: binary"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no readable text in .*empty; tried 0 files"):
        load(tmp_path / "empty")


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_a_line_that_is_no_json_is_named_by_file_and_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no JSON"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_is_too_deep_is_named_with_its_line(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl?, line 2: no JSON"):
        load(tmp_path / name)


def test_records_without_text_name_the_fields_present(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl").write_text('{"content": "one", "id": 1}\n')
    with pytest.raises(ValueError, match=r'a\.jsonl, line 1: no "text" field; fields present: content, id'):
        load(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text('{"content": "one"}')
    with pytest.raises(ValueError, match=r'a\.json, record 0: no "text" field; fields present: content'):
        load(tmp_path / "a.json")
    parquet(tmp_path / "a.parquet", content=["one"], id=[1])
    with pytest.raises(ValueError, match=r'a\.parquet: no "text" column; columns present: content, id'):
        load(tmp_path / "a.parquet")


def test_text_that_is_no_string_and_lines_that_are_no_objects_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ValueError, match=r'line 1: "text" is NoneType'):
        load(tmp_path)
    (tmp_path / "a.jsonl").write_text('["one"]\n')
    with pytest.raises(ValueError, match="line 1: expected an object"):
        load(tmp_path)


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"a\.parquet: no Parquet file"):
        load(tmp_path)


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83e a needle and more"}\n')
    assert "".join(texts(load(tmp_path).train)).startswith("half ? a")


def test_any_tokenizer_splits_the_same_documents(folder, corpus):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    base = byte_tokenizer()
    vocab = base.get_vocab() | {"li": 257, "ne": 258, "line": 259}
    del vocab["<|eot|>"]
    bpe = Tokenizer(models.BPE(vocab=vocab | {"<|endoftext|>": 256}, merges=[("l", "i"), ("n", "e"), ("li", "ne")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    other = load_corpus(CorpusConfig(kind="files", paths=(folder,), held_out=0.2), bpe)
    assert len(other.train.tokens) < len(corpus.train.tokens)
    decoded = [bpe.decode(other.train[i][:-1].tolist()) for i in range(len(other.train))]
    assert decoded == texts(corpus.train)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "web"}, "corpus: kind is 'web', expected 'stdlib' or 'files'"),
        ({"kind": "files"}, "with 0 paths"),
        ({"paths": ("a",)}, "with 1 paths"),
        ({"held_out": 0.0}, r"corpus: held_out is 0.0, expected a number in \(0, 1\)"),
        ({"max_bytes": 0}, "corpus: max_bytes is 0, expected a whole number >= 1"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        CorpusConfig(**settings)
