"""What is read of one's own files and what is left: all of it said, by name and number."""

import json
import os

import numpy as np
import pytest

from needlework.data import CorpusConfig, Files, StoreConfig, byte_tokenizer, decode_bytes, load_corpus, prepare, text_read
from needlework.data.files import found
from needlework.data.reading import Reader


def words(n, start=0):
    return "".join(f"word {i} of a line\n" for i in range(start, start + n))


def load(*paths, **settings):
    return load_corpus(CorpusConfig(kind="files", paths=paths, **settings), byte_tokenizer())


def store(directory, *paths, **settings):
    return prepare(StoreConfig(source=Files(paths=paths, **settings), tokenizer="bytes"), directory)


def text_of(corpus):
    ids = np.concatenate([corpus.train.tokens, corpus.held_out.tokens])
    return decode_bytes(ids).decode()


def test_what_a_cap_cuts_off_is_counted_in_files_and_bytes(tmp_path):
    """Five files of 60 bytes and room for 150: two whole, half of one, two never opened."""
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 60)
    corpus = load(tmp_path, max_bytes=150)
    totals = corpus.manifest["totals"]
    assert (totals["files"], totals["files_cut"], totals["files_left_unread"], totals["bytes"]) == (3, 1, 2, 150)
    assert totals["bytes_left_unread"] == 150
    assert [entry.get("read") for entry in corpus.manifest["files"]] == [None, None, 30]
    assert text_read(corpus.manifest) == "3 files, 150 bytes of text; left unread: the end of one and 2 files, 150 bytes"


def test_a_cap_that_falls_between_files_or_on_the_last_byte_cuts_nothing(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 60)
    totals = load(tmp_path, max_bytes=60).manifest["totals"]
    assert (totals["files"], totals["files_cut"], totals["files_left_unread"], totals["bytes_left_unread"]) == (1, 0, 1, 60)
    whole = load(tmp_path, max_bytes=120).manifest
    assert (whole["totals"]["files_cut"], whole["totals"]["bytes_left_unread"]) == (0, 0)
    assert text_read(whole) == "2 files, 120 bytes of text"


def test_a_cap_in_the_middle_of_records_says_what_of_the_file_is_left(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": c * 50}) + "\n" for c in "abcd"))
    corpus = load(tmp_path, max_bytes=120)
    totals = corpus.manifest["totals"]
    assert (totals["documents"], totals["files_cut"], totals["bytes"]) == (3, 1, 120)
    assert totals["bytes_left_unread"] == (tmp_path / "a.jsonl").stat().st_size - 120
    assert load(tmp_path, max_bytes=100).manifest["totals"]["files_cut"] == 1  # between two records


def test_a_cap_in_the_middle_of_a_character_ends_the_reading(tmp_path):
    """No other file is opened for the bytes that a character left over."""
    (tmp_path / "a.txt").write_text("ä" * 10)
    (tmp_path / "b.txt").write_text("ö" * 10)
    totals = load(tmp_path, max_bytes=11).manifest["totals"]
    assert (totals["bytes"], totals["files"], totals["files_left_unread"], totals["bytes_left_unread"]) == (10, 1, 1, 30)


def test_empty_and_repeated_documents_are_counted(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(words(9))
    (tmp_path / "other.txt").write_text(words(20, 50))
    totals = load(tmp_path).manifest["totals"]
    assert (totals["documents"], totals["documents_empty"], totals["documents_repeated"]) == (2, 1, 2)
    assert "2 documents left out, repeated" in text_read(load(tmp_path).manifest)


def test_what_cannot_be_read_is_named_with_its_reason(tmp_path, monkeypatch):
    for name in ("good", "closed", "latin", "more"):
        (tmp_path / f"{name}.txt").write_text(words(20, len(name)))
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "folder").mkdir()
    opened, scanned = type(tmp_path).open, os.scandir

    def guarded(self, *arguments, **options):
        if self.name == "closed.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    def scan(path):
        if os.fspath(path).endswith("folder"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scanned(path)

    monkeypatch.setattr(type(tmp_path), "open", guarded)
    monkeypatch.setattr(os, "scandir", scan)
    manifest = load(tmp_path).manifest
    reasons = {entry["name"]: entry["reason"] for entry in manifest["skipped"]}
    assert sorted(reasons) == ["closed.txt", "folder", "latin.txt", "nowhere.txt"] and manifest["totals"]["files_skipped"] == 4
    assert "Permission denied" in reasons["closed.txt"] and "not UTF-8" in reasons["latin.txt"]
    assert "No such file" in reasons["nowhere.txt"]
    assert "4 files skipped, no text: " in text_read(manifest) and " …" in text_read(manifest)
    with pytest.raises(PermissionError, match=r"closed\.txt"):
        load(tmp_path / "closed.txt")


def test_two_folders_may_have_files_of_one_name(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "x.txt").write_text("a" * 40)
    (tmp_path / "b" / "x.txt").write_text("b" * 40)
    totals = load(tmp_path / "a", tmp_path / "b", max_bytes=50).manifest["totals"]
    assert (totals["files"], totals["files_cut"], totals["bytes_left_unread"], totals["files_left_unread"]) == (2, 1, 30, 0)


def test_a_file_whose_name_is_no_text_is_read(tmp_path):
    (tmp_path / os.fsdecode(b"na\xefve.txt")).write_text(words(30))
    assert text_of(load(tmp_path)).count("word") == 30


def test_hidden_files_and_what_lies_in_hidden_folders_are_no_part(tmp_path):
    (tmp_path / ".git" / "deep").mkdir(parents=True)
    (tmp_path / ".git" / "deep" / "a.txt").write_text("no")
    (tmp_path / ".b").write_text("no")
    (tmp_path / "c.txt").write_text("yes")
    assert [source.name for source in found([tmp_path])] == ["c.txt"]


def test_nested_json_without_an_end_is_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ' + "[" * 100_000 + "\n")
    for read in (lambda: load(tmp_path), lambda: store(tmp_path / "store", tmp_path / "a.jsonl")):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no JSON"):
            read()


def test_a_store_of_files_holds_what_is_read_into_memory(tmp_path):
    """Text, records, what is no text and what is repeated side by side: one rule for both."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.md").write_text(words(20, i))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": words(5, i)}) + "\n" for i in (1, 2, 2)))
    (folder / "image.png").write_bytes(b"\0")
    memory, disk = load(folder, held_out=0.2, max_bytes=1 << 20), store(tmp_path / "store", folder, held_out=0.2)
    for side in ("train", "held_out"):
        np.testing.assert_array_equal(getattr(memory, side).tokens, getattr(disk, side).tokens)
        np.testing.assert_array_equal(getattr(memory, side).offsets, getattr(disk, side).offsets)
    for key in ("files", "skipped"):
        assert memory.manifest[key] == disk.manifest[key]
    assert (
        disk.manifest["totals"].items()
        >= {"files": 31, "files_skipped": 1, "documents_repeated": 1, "stopped_by": None}.items()
    )
    assert text_read(memory.manifest) == text_read(disk.manifest)


def test_a_store_of_one_file_holds_out_its_end(tmp_path):
    (tmp_path / "book.txt").write_text("ä" + words(500))
    corpus = store(tmp_path / "store", tmp_path / "book.txt")
    assert text_of(corpus) == "ä" + words(500)
    held_out = len(corpus.held_out.tokens) / (len(corpus.train.tokens) + len(corpus.held_out.tokens))
    assert held_out == pytest.approx(0.05, rel=0.02) and corpus.manifest["split"]["by"] == "end of the longest document"


def test_a_stream_of_files_goes_on_after_the_piece_that_came_last(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(words(3 + 10 * i, i))
    for paths in ((tmp_path,), (tmp_path / "4.txt",)):
        pieces = list(Files(paths=paths).stream())
        for stop in range(len(pieces)):
            stream = Files(paths=paths).stream()
            begun = iter(stream)
            assert [next(begun) for _ in range(stop)] == pieces[:stop]
            again = Files(paths=paths).stream()
            again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
            assert list(again) == pieces[stop:]


def test_another_text_under_the_same_name_is_another_source(tmp_path):
    (tmp_path / "a.txt").write_text(words(9))
    before = Files(paths=(tmp_path / "a.txt",)).identity()
    assert Files(paths=(tmp_path / "a.txt",)).identity() == before
    (tmp_path / "a.txt").write_text(words(9, 1))
    assert Files(paths=(tmp_path / "a.txt",)).identity() != before


def test_a_file_that_changes_under_the_reader_is_told(tmp_path):
    (tmp_path / "a.txt").write_text(words(9))
    source = Files(paths=(tmp_path / "a.txt",))
    source.listed()
    (tmp_path / "a.txt").write_text(words(9, 1))
    with pytest.raises(Exception, match="changed while it was read"):
        list(source.stream())


@pytest.mark.parametrize("bound, most", [("max_documents", 3), ("max_tokens", 500)])
def test_a_bound_that_ends_a_store_is_in_its_manifest_and_its_line(tmp_path, bound, most):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(words(10, i))
    bounded = store(tmp_path / "store", folder, held_out=0.3, **{bound: most}).manifest
    assert bounded["totals"]["stopped_by"] == bound and text_read(bounded).endswith(f"; stopped at {bound}")
    assert store(tmp_path / "all", folder, held_out=0.3).manifest["totals"]["stopped_by"] is None


def test_a_reader_without_a_cap_reads_all(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 10_000)
    assert list(Reader(found([tmp_path]))) == [("a.txt", b"x" * 10_000)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Files(paths=()), "paths is empty"),
        (lambda: Files(paths=("a",), held_out=1.0), r"source: held_out is 1.0, expected a number in \(0, 1\)"),
        (lambda: Files(paths=("a",), held_out=float("nan")), r"source: held_out is nan, expected a number in \(0, 1\)"),
        (lambda: Files(paths=("a",), max_tokens=0), "source: max_tokens is 0, expected a whole number >= 1 or None"),
        (lambda: StoreConfig(source=Files(paths=("a",)), vocabulary=256), "vocabulary is 256, expected at least 257"),
        (
            lambda: StoreConfig(source=Files(paths=("a",)), tokenizer_bytes=0),
            "store: tokenizer_bytes is 0, expected a whole number >= 1",
        ),
    ],
)
def test_a_range_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_files_without_text_are_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"(?s)no readable text in .*a\.bin: binary"):
        Files(paths=(tmp_path,)).listed()
