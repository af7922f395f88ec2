"""From text to tokens on disk: the same whatever happened on the way, and never half of it taken for the whole."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from needlework.data import (
    Corpus,
    Hub,
    Local,
    NeedleMix,
    Packages,
    SourceError,
    StoreConfig,
    StoreError,
    Text,
    decode_bytes,
    many_needles,
    open_corpus,
    prepare,
    verify_corpus,
)
from needlework.data.corpus import is_held_out

pytestmark = pytest.mark.usefixtures("offline")
preparation = import_module("needlework.data.preparation")
TEXTS = [f"record {i}: " + " ".join(f"word{i * j % 97}" for j in range(30 + i % 50)) for i in range(200)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(preparation, "CHUNK", 4000)  # about ten of them


@pytest.fixture
def records(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"id": f"id-{i}", "text": TEXTS[i]}) + "\n" for i in range(part, 200, 3)]
        (folder / f"{part}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def config(records):
    return StoreConfig(source=Local(paths=(records,), held_out=0.2), tokenizer="bytes")


def texts(documents):
    assert all(documents[i][-1] == 256 for i in range(len(documents)))
    return [decode_bytes(documents[i]).decode() for i in range(len(documents))]


def files(directory):
    names = [
        "tokenizer.json",
        "manifest.json",
        *(f"{s}/{n}" for s in ("train", "held_out") for n in ("tokens.bin", "offsets.npy")),
    ]
    return {name: (directory / name).read_bytes() for name in names}


def test_every_document_is_on_its_side_in_the_streams_order(config, tmp_path):
    corpus = prepare(config, tmp_path / "corpus")
    order = [i for part in range(3) for i in range(part, 200, 3)]
    assert texts(corpus.held_out) == [TEXTS[i] for i in order if is_held_out(f"id-{i}", 0.2)]
    assert texts(corpus.train) == [TEXTS[i] for i in order if not is_held_out(f"id-{i}", 0.2)]
    assert isinstance(corpus.train.tokens, np.memmap) and corpus.train.tokens.dtype == np.uint16
    totals = corpus.manifest["totals"]
    assert totals["bytes"] == sum(map(len, TEXTS))
    assert (totals["train_tokens"], totals["held_out_tokens"]) == (len(corpus.train.tokens), len(corpus.held_out.tokens))
    assert [entry["name"] for entry in corpus.manifest["files"]] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert sorted(path.name for path in (tmp_path / "corpus" / "train").iterdir()) == [
        "manifest.json",
        "offsets.npy",
        "tokens.bin",
    ]
    assert not (tmp_path / "corpus" / "progress.json").exists()


def test_files_of_a_hub_source_become_a_whole_corpus_with_its_manifest(records, tmp_path):
    source = Hub(path="json", files=tuple(map(str, sorted(records.iterdir()))), held_out=0.2)
    corpus = prepare(StoreConfig(source=source, tokenizer="bytes"), tmp_path / "hub")
    local = prepare(StoreConfig(source=Local(paths=(records,), held_out=0.2), tokenizer="bytes"), tmp_path / "local")
    assert corpus.manifest["split"] == {"by": "sha256 of the key", "share": 0.2}
    assert corpus.manifest["sha256"] == local.manifest["sha256"] and corpus.manifest["source"]["split"] == "train"


def test_tasks_and_text_read_a_store_as_they_read_memory(config, tmp_path):
    corpus = prepare(config, tmp_path / "corpus")
    held = [type(corpus.train)(np.array(side.tokens), np.array(side.offsets)) for side in (corpus.train, corpus.held_out)]
    memory = Corpus(*held, corpus.tokenizer, {})
    for task in (NeedleMix(), Text()):
        for a, b in zip(task.batch(corpus, 0, 3, 4, 128), task.batch(memory, 0, 3, 4, 128), strict=True):
            assert (a == b).all()
    assert (many_needles(corpus, 0, 3, 200).input_ids == many_needles(memory, 0, 3, 200).input_ids).all()


def test_a_finished_corpus_is_opened_and_not_made_again(config, tmp_path):
    seen = []
    first = prepare(config, tmp_path / "corpus", seen.append)
    assert {p.stage for p in seen} == {"tokens"} and len(seen) > 5
    assert [p.documents for p in seen] == sorted(p.documents for p in seen)
    assert seen[-1].documents == 200
    assert seen[-1].tokens == len(first.train.tokens) + len(first.held_out.tokens)
    again = prepare(config, tmp_path / "corpus", pytest.fail)
    assert again.manifest == first.manifest


def test_a_vocabulary_is_trained_on_the_training_side_alone(records, tmp_path, monkeypatch):
    read = []
    train = preparation.train_tokenizer
    monkeypatch.setattr(preparation, "train_tokenizer", lambda texts, size: train(read.extend(texts) or read, size))
    corpus = prepare(StoreConfig(source=Local(paths=(records,), held_out=0.2), vocabulary=262), tmp_path / "corpus")
    assert sorted(read) == sorted(text for i, text in enumerate(TEXTS) if not is_held_out(f"id-{i}", 0.2))
    assert corpus.tokenizer.get_vocab_size() == corpus.manifest["tokenizer"]["vocabulary"] == 262
    assert corpus.tokenizer.decode(corpus.held_out[0][:-1].tolist()) in TEXTS
    assert (corpus.train.tokens == 0).sum() == len(corpus.train)


KILLED = """
import os, signal, sys
from importlib import import_module
from needlework.data import Local, StoreConfig, prepare
import datasets
preparation, store = import_module("needlework.data.preparation"), import_module("needlework.data.store")
preparation.CHUNK = 4000
records, folder, *places = sys.argv[1:]

def dying(function, calls):
    def counted(*arguments):
        nonlocal calls
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return counted

for place in places:
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, place
        continue
    progress = lambda p: None
    match place:
        case "before the journal": store.Writer.sync = dying(store.Writer.sync, 9)
        case "after the journal": progress = dying(progress, 4)
        case "between the stores": store.Writer.finish = dying(store.Writer.finish, 2)
        case "while finishing": store.digest = dying(store.digest, 2)
        case "before the manifest": preparation._manifest = dying(preparation._manifest, 1)
    prepare(StoreConfig(source=Local(paths=(records,), held_out=0.2), tokenizer="bytes"), f"{folder}/{place}", progress)
    os._exit(0)
"""
PLACES = ("before the journal", "after the journal", "between the stores", "while finishing", "before the manifest")


def test_killed_anywhere_it_goes_on_to_the_same_bytes(config, records, tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(records), str(tmp_path), *PLACES]
    subprocess.run(arguments, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    prepare(config, tmp_path / "whole")
    for place in PLACES:
        with pytest.raises(StoreError, match="unfinished, it has no manifest"):
            open_corpus(tmp_path / place)
        seen = []
        prepare(config, tmp_path / place, seen.append)
        assert all(p.taken_over > 0 for p in seen)
        assert bool(seen) == ("journal" in place)  # else all text was tokenised before
        assert files(tmp_path / place) == files(tmp_path / "whole")


def stopped(config, directory, chunks=3):
    def stop(progress):
        nonlocal chunks
        chunks -= 1
        if chunks == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, directory, stop)


@pytest.mark.parametrize("what", ["shorter tokens", "another file", "a torn journal"])
def test_what_cannot_be_gone_on_with_is_made_again_and_says_why(config, records, tmp_path, what):
    stopped(config, tmp_path / "corpus")
    if what == "shorter tokens":
        os.truncate(tmp_path / "corpus" / "train" / "tokens.bin", 100)
        message = r"tokenised again from the start: .*tokens\.bin has 100 bytes, \d+ were written before"
    elif what == "a torn journal":
        os.truncate(tmp_path / "corpus" / "progress.json", 30)
        message = r"tokenised again from the start: .*progress\.json: torn"
    else:
        (records / "0.jsonl").write_text('{"text": "other words", "id": "z"}\n')
        message = "tokenised again from the start: files changed since"
    seen = []
    with pytest.warns(UserWarning, match=message):
        prepare(config, tmp_path / "corpus", seen.append)
    assert {p.taken_over for p in seen} == {0}
    prepare(config, tmp_path / "whole")
    assert files(tmp_path / "corpus") == files(tmp_path / "whole")


def test_a_source_that_breaks_keeps_what_was_read(config, tmp_path, monkeypatch):
    stream = Local.stream
    monkeypatch.setattr(Local, "stream", lambda self: Breaking(stream(self)))
    with pytest.raises(SourceError, match="cannot be read after 150 records"):
        prepare(config, tmp_path / "corpus")
    monkeypatch.undo()
    seen = []
    prepare(config, tmp_path / "corpus", seen.append)
    assert seen[0].taken_over > 50


class Breaking:
    def __init__(self, stream):
        self.stream, self.state_dict = stream, stream.state_dict

    def __iter__(self):
        for i, piece in enumerate(self.stream):
            if i == 150:
                raise SourceError("it cannot be read after 150 records")
            yield piece


def test_processes_that_prepare_at_once_wait_for_the_first(config, tmp_path):
    calls, corpora = [], []
    run = lambda name: corpora.append(prepare(config, tmp_path / "corpus", lambda p: calls.append(name)))
    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(corpora) == 3 and len(set(calls)) == 1
    assert all(corpus.manifest == corpora[0].manifest for corpus in corpora)


def test_another_configs_directory_is_refused_by_field(config, records, tmp_path):
    prepare(config, tmp_path / "corpus")
    other = StoreConfig(source=Local(paths=(records,), held_out=0.3), vocabulary=500)
    with pytest.raises(StoreError, match="made with another held_out, tokenizer, vocabulary"):
        prepare(other, tmp_path / "corpus")


def test_caps_end_with_a_document(records, tmp_path):
    few = prepare(
        StoreConfig(source=Local(paths=(records,), held_out=0.2, max_documents=50), tokenizer="bytes"), tmp_path / "a"
    )
    assert len(few.train) + len(few.held_out) == 50
    short = prepare(
        StoreConfig(source=Local(paths=(records,), held_out=0.2, max_tokens=9000), tokenizer="bytes"), tmp_path / "b"
    )
    total = len(short.train.tokens) + len(short.held_out.tokens)
    last = max(len(side[len(side) - 1]) for side in (short.train, short.held_out))
    assert 9000 <= total < 9000 + last
    assert set(texts(short.train)) < set(TEXTS)


def test_a_side_without_a_document_is_refused(records, tmp_path):
    one = StoreConfig(source=Local(paths=(records,), max_documents=1), tokenizer="bytes")
    with pytest.raises(StoreError, match="held_out: no document came to this side"):
        prepare(one, tmp_path / "corpus")


def test_packages_become_one_document_each(tmp_path):
    for i in range(12):
        (tmp_path / f"site/p{i}").mkdir(parents=True)
        for part in "ab":
            (tmp_path / f"site/p{i}/{part}.py").write_text(f"def {part}():\n    return {i}\n")
    source = Packages(roots=(tmp_path / "site",))
    corpus = prepare(StoreConfig(source=source, tokenizer="bytes"), tmp_path / "corpus")
    assert len(corpus.train) + len(corpus.held_out) == 12
    for side in (corpus.train, corpus.held_out):
        assert (side.tokens == 256).sum() == len(side)
    total = len(corpus.train.tokens) + len(corpus.held_out.tokens)  # the last document's two files have about 30 each
    capped = prepare(StoreConfig(source=replace(source, max_tokens=total - 40), tokenizer="bytes"), tmp_path / "capped")
    assert len(capped.train.tokens) + len(capped.held_out.tokens) == total
    few = prepare(StoreConfig(source=replace(source, max_documents=11), tokenizer="bytes"), tmp_path / "few")
    assert set(texts(few.train) + texts(few.held_out)) < set(texts(corpus.train) + texts(corpus.held_out))
    assert len(few.train) + len(few.held_out) == 11
    assert (few.train.tokens == 256).sum() + (few.held_out.tokens == 256).sum() == 11
    assert few.train.offsets[-1] == len(few.train.tokens) and few.held_out.offsets[-1] == len(few.held_out.tokens)
    assert all(text.count("# p") == 2 for side in (corpus.train, corpus.held_out) for text in texts(side))
    assert {entry["name"] for entry in corpus.manifest["files"] if entry["held_out"]} == {
        text[2 : text.index("/")] for text in texts(corpus.held_out)
    }
    assert corpus.manifest["totals"]["files"] == 24


@pytest.mark.parametrize("name", ["train/tokens.bin", "held_out/offsets.npy", "tokenizer.json"])
def test_a_changed_file_is_found_when_all_is_read(config, tmp_path, name):
    prepare(config, tmp_path / "corpus")
    verify_corpus(tmp_path / "corpus")
    path = tmp_path / "corpus" / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 8 if name != "tokenizer.json" else ord("\n") ^ ord(" ")
    path.write_bytes(data)
    open_corpus(tmp_path / "corpus")
    with pytest.raises(StoreError, match=rf"{path.name} does not match its sha256"):
        verify_corpus(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("name", "message"),
    [("train/tokens.bin", r"tokens\.bin has \d+ bytes"), ("train/offsets.npy", r"offsets\.npy cannot be read")],
)
def test_a_file_cut_short_is_found_on_opening(config, tmp_path, name, message):
    prepare(config, tmp_path / "corpus")
    path = tmp_path / "corpus" / name
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(StoreError, match=message):
        open_corpus(tmp_path / "corpus")


def test_a_tokenizer_that_nobody_has_is_named(records, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the library reads it itself
    config = StoreConfig(source=Local(paths=(records,)), tokenizer="nobody/nothing")
    with pytest.raises(SourceError, match="nobody/nothing is no file here, and the Hub does not give it"):
        prepare(config, tmp_path / "corpus")
