"""A torn file is named wherever it is read."""

import json
import lzma

import pytest

from needlework.data import Local, StoreConfig, open_corpus, prepare
from needlework.json_file import json_files, read_json
from needlework.train import Parallel, metadata
from needlework.train.world import World

TORN = {"half": b'{"a": [1, 2', "empty": b"", "no text": b"\x80\x02\xff", "too deep": b"[" * 100_000}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_a_torn_file_is_named_in_one_line(tmp_path, content):
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^.*some\.json: torn, or no JSON \(.+\)$"):
        read_json(tmp_path / "some.json")


def test_compressed_json_is_the_same_json_to_the_last_digit(tmp_path):
    held = {"loss": [0.1, 1 / 3, 1e-300], "name": "Q-Δ"}
    (tmp_path / "b.json").write_text(json.dumps(held), encoding="utf-8")
    (tmp_path / "a.json.xz").write_bytes(lzma.compress((tmp_path / "b.json").read_bytes(), preset=9))
    (tmp_path / "c.txt").touch()
    assert [path.name for path in json_files(tmp_path)] == ["a.json.xz", "b.json"]
    assert [read_json(path) for path in json_files(tmp_path)] == [held, held]
    assert json_files(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", [*TORN.values(), lzma.compress(b'{"a": 1}')[:-9], lzma.compress(TORN["half"])])
def test_a_torn_compressed_file_is_named_in_one_line(tmp_path, content):
    (tmp_path / "some.json.xz").write_bytes(content)
    with pytest.raises(ValueError, match=r"^.*some\.json\.xz: torn, or no JSON \(.+\)$"):
        read_json(tmp_path / "some.json.xz")


def test_a_training_names_its_torn_ran_json(tmp_path):
    import torch

    (tmp_path / "ran.json").write_text('[{"started"')
    with World.open(Parallel()) as world, pytest.raises(ValueError, match=r"ran\.json: torn"):
        metadata.write(tmp_path / "ran.json", {"seed": 0}, world, torch.device("cpu"), None)
    assert (tmp_path / "ran.json").read_text() == '[{"started"'


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "train/manifest.json", "tokenizer.json"])
def test_a_prepared_corpus_names_the_file_that_is_torn(tmp_path, name):
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "words {i}"}}\n' for i in range(40)))
    config = StoreConfig(source=Local(paths=(tmp_path / "text.jsonl",), held_out=0.3), tokenizer="bytes")
    prepare(config, tmp_path / "corpus")
    file = tmp_path / "corpus" / name
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=rf"{name}.*"):
        prepare(config, tmp_path / "corpus")
    if name != "config.json":
        with pytest.raises(ValueError, match=rf"{name}.*"):
            open_corpus(tmp_path / "corpus")
