"""A small corpus that the data tests share: forty files of numbered lines, so that each text and place is unique."""

import pytest

from needlework.data import CorpusConfig, byte_tokenizer, load_corpus


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (root / f"file{i:02}.txt").write_text("".join(f"line {n} of file {i}\n" for n in range(200)))
    return root


@pytest.fixture(scope="session")
def corpus(folder):
    return load_corpus(CorpusConfig(kind="files", paths=(folder,), held_out=0.2), byte_tokenizer())


@pytest.fixture
def offline(monkeypatch):
    """`datasets` counts a load on the Hub even when files are local; here it and the Hub's client stay at home."""
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
