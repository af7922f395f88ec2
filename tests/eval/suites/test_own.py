"""The suites that need no lm-eval, on models whose answers are known, and where data sets come from."""

import math
import os

import pytest
import torch
from torch.nn.functional import one_hot

from needlework.data import byte_tokenizer, load_corpus
from needlework.eval.suites.induction import Induction
from needlework.eval.suites.number import Unavailable
from needlework.eval.suites.perplexity import Stream, window_nats
from needlework.eval.suites.sources import is_fixture, reachable
from needlework.eval.suites.subject import Subject

UNIFORM = lambda ids, keep: torch.zeros(len(ids), keep, 257)


def subject(read, text=None, **more):
    conditions = {
        "tokenizer": None,
        "tokenizer_at": "",
        "words": byte_tokenizer(),
        "at_once": lambda T: 3,
        "corpus": lambda: load_corpus(text, byte_tokenizer()),
    }
    return Subject(**{"model": None, "read": read} | conditions | more)


def copies(ids, keep):
    """Says what followed the last place where the last nine tokens came before; else a space. An induction head."""
    says = torch.full((len(ids), keep), 32)
    for row, said in zip(ids.tolist(), says, strict=True):
        for at in range(keep):
            end = len(row) - keep + at + 1
            for j in range(end - 2, 8, -1):
                if row[j - 8 : j + 1] == row[end - 9 : end]:
                    said[at] = row[j + 1]
                    break
    return 30.0 * one_hot(says, 257)


def test_an_induction_head_finds_every_digit_and_a_guess_none(small_text):
    found = Induction().measure(subject(copies, small_text, limit=4), 100)["metrics"]
    assert [found[name]["value"] for name in ("accuracy", "exact", "free_accuracy", "free_exact")] == [1, 1, 1, 1]
    assert found["nats"]["value"] < 1e-6 and found["absent_nats"]["value"] > 10 and len(found["exact"]["documents"]) == 4
    blind = Induction().measure(subject(UNIFORM, small_text, limit=4), 100)["metrics"]
    assert blind["accuracy"]["value"] == blind["free_accuracy"]["value"] == 0
    assert blind["nats"]["value"] == pytest.approx(math.log(257)) == pytest.approx(blind["absent_nats"]["value"])


def test_free_running_goes_on_from_its_own_digits(small_text):
    """It copies, but takes every first digit for another: teacher-forced that is one of five, free all that follows is lost."""

    def errs(ids, keep):
        scores = copies(ids, keep)
        for row, ids_of_row in enumerate(ids.tolist()):
            for at in range(keep):
                end = len(ids_of_row) - keep + at + 1
                if bytes(b for b in ids_of_row[:end] if b < 256).endswith(b" is "):
                    scores[row, at] = 30.0 * one_hot(torch.tensor(33), 257)
        return scores

    found = Induction().measure(subject(errs, small_text, limit=3), 50)["metrics"]
    assert found["accuracy"]["value"] == pytest.approx(0.8) and found["exact"]["value"] == 0
    assert found["free_accuracy"]["value"] == 0


def test_a_distance_without_a_document_is_a_reason(small_text):
    with pytest.raises(Unavailable, match=r"the filler is 10000\d\d tokens of one held-out document, but the longest has"):
        Induction().measure(subject(UNIFORM, small_text), 10**6)


def test_perplexity_is_of_whole_windows_and_weighted_by_tokens(monkeypatch):
    rows = {"text": ["ab" * 10, "cd", "ab" * 10]}
    monkeypatch.setattr(
        "datasets.load_dataset", lambda path, config, split: rows if (path, config, split) == ("p", None, "s") else None
    )
    stream = Stream(task="t", path="p", config=None, split="s", text="text")
    cell = stream.measure(subject(UNIFORM), 8)["metrics"]["perplexity"]
    assert cell["value"] == pytest.approx(257) and cell["weights"] == [7, 7, 7], "20 + 1 + 2 + 1 tokens, the same text once"
    assert len(stream.measure(subject(UNIFORM, limit=2), 8)["metrics"]["perplexity"]["documents"]) == 2
    with pytest.raises(Unavailable, match="its stream has 24 tokens, and a window has 25"):
        stream.measure(subject(UNIFORM), 25)


def test_a_windows_nats_are_of_the_next_tokens():
    follows = lambda ids, keep: 30.0 * one_hot((ids + 1) % 257, 257)
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3], [5, 5, 5, 5]])
    assert window_nats(subject(follows), rows) == pytest.approx([0, 30, 90], abs=1e-5)


def test_a_long_window_is_summed_piece_by_piece(monkeypatch):
    monkeypatch.setattr("needlework.eval.suites.perplexity.PIECE", 3)
    assert window_nats(subject(UNIFORM), torch.zeros(2, 9, dtype=torch.long)) == pytest.approx([8 * math.log(257)] * 2)


def test_a_folder_of_data_sets_is_the_working_directory_while_they_are_read(tmp_path):
    before = os.getcwd()
    with reachable(tmp_path):
        assert os.getcwd() == str(tmp_path)
    with pytest.raises(Unavailable, match=r"^KeyError: 'field'$"), reachable(tmp_path):
        raise KeyError("field")
    with pytest.raises(KeyboardInterrupt), reachable(tmp_path):
        raise KeyboardInterrupt
    with pytest.raises(MemoryError), reachable(None):
        raise MemoryError
    assert os.getcwd() == before


def test_made_up_data_sets_are_marked(tmp_path):
    assert not is_fixture(None) and not is_fixture(tmp_path)
    (tmp_path / "FIXTURE").touch()
    assert is_fixture(tmp_path)
