"""Epochs over text: every window once, whichever ranks read it and wherever they went on."""

import numpy as np
import pytest
import torch

from needlework.data import Corpus, Documents, NeedleMix, PackedText, Text, byte_tokenizer, epoch_steps, pack, rank_rows

T, B = 8, 4


@pytest.fixture(scope="module")
def counted():
    """A corpus whose token is its place, in documents of 1 to 30 tokens; 41 windows of 8 and some more."""
    rng = np.random.default_rng(0)
    tokens = np.arange(41 * T + 5, dtype=np.uint16)
    offsets = np.unique(np.concatenate([[0, len(tokens)], np.cumsum(rng.integers(1, 30, size=18))]))
    documents = Documents(tokens, offsets[offsets <= len(tokens)])
    return Corpus(documents, documents, byte_tokenizer(), {})


def test_resuming_on_other_numbers_of_ranks_reads_every_window_once_in_the_same_batches(counted):
    whole = [Text().batch(counted, 5, step, B, T) for step in range(20)]
    worlds = [2] * 3 + [4] * 8 + [1] * 9  # two ranks for three steps, then four, then one
    windows = []
    for step, world in enumerate(worlds):
        parts = [Text().batch(counted, 5, step, B, T, rank_rows(B, rank, world)) for rank in range(world)]
        for of_ranks, together in zip(zip(*parts, strict=True), whole[step], strict=True):
            assert torch.equal(torch.cat(of_ranks), together)
        windows += [int(row[0]) // T for part in parts for row in part.input_ids]
    assert sorted(windows[:41]) == list(range(41))
    assert len(set(windows[41:])) == 80 - 41  # the second epoch, not yet at its end
    assert windows[:39] != windows[41:]
    assert epoch_steps(counted, B, T) == 41 / 4


def test_a_row_is_a_window_and_its_labels_are_the_next_tokens(counted):
    batch = Text().batch(counted, 0, 0, B, T)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    for inputs, labels in zip(*batch, strict=True):
        assert inputs[0] % T == 0
        assert torch.equal(inputs, inputs[0] + torch.arange(T))
        assert torch.equal(labels, inputs + 1)


def test_packed_text_is_the_same_windows_with_documents_apart(counted):
    for step in range(10):
        rows = Text().batch(counted, 2, step, B, T).input_ids
        packed = PackedText().batch(counted, 2, step, B, T)
        assert torch.equal(packed.input_ids, rows.reshape(1, -1))
        assert {0, T, 2 * T, 3 * T, 4 * T} <= set(packed.cu_seqlens.tolist())
        assert packed.cu_seqlens.dtype == torch.int32
        for i, row in enumerate(rows):
            alone = pack(counted.train, T, int(row[0]))
            inside = packed.cu_seqlens[(packed.cu_seqlens >= i * T) & (packed.cu_seqlens <= (i + 1) * T)] - i * T
            assert torch.equal(inside, alone.cu_seqlens)
            assert torch.equal(packed.labels[:, i * T : (i + 1) * T], alone.labels)
    half = PackedText().batch(counted, 2, 9, B, T, range(2, 4))
    assert torch.equal(half.input_ids, packed.input_ids[:, 2 * T :])


def test_a_cut_ends_a_sequence_and_no_loss(counted):
    plain, cut = (PackedText(cut=n).batch(counted, 2, 0, B, 40) for n in (None, 4))
    assert torch.equal(plain.labels, cut.labels)
    assert set(plain.cu_seqlens.tolist()) < set(cut.cu_seqlens.tolist())
    assert cut.cu_seqlens.diff().max() == 4


def test_the_rows_of_a_rank_are_the_rows_of_the_batch(corpus):
    whole = NeedleMix().batch(corpus, 1, 2, 8, 128)
    part = NeedleMix().batch(corpus, 1, 2, 8, 128, range(3, 7))
    assert torch.equal(part.input_ids, whole.input_ids[3:7]) and torch.equal(part.labels, whole.labels[3:7])


@pytest.mark.parametrize("task", [Text(), PackedText()])
def test_text_shorter_than_a_window_is_refused(counted, task):
    n = len(counted.train.tokens)
    with pytest.raises(ValueError, match=f"T = {n} and {n} training tokens"):
        task.batch(counted, 0, 0, 1, n)
    with pytest.raises(ValueError, match="got B = 0, T = 8"):
        task.batch(counted, 0, 0, 0, T)
    with pytest.raises(ValueError, match="packed text: cut is 0, expected a whole number >= 1 or None"):
        PackedText(cut=0)
