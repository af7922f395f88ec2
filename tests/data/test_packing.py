"""Rows of documents: every token once, no label across a boundary, and windows that are functions of their arguments."""

import itertools

import numpy as np
import pytest
import torch

from needlework.data import Corpus, Documents, byte_tokenizer, decode_bytes, held_out_text, long_documents, pack, windows

DOCUMENTS = Documents.join([np.arange(10 * i, 10 * i + n, dtype=np.uint16) for i, n in enumerate((5, 3, 8, 1, 4))])
TOKENS = DOCUMENTS.tokens.tolist()


def test_a_row_is_cut_at_every_document():
    row = pack(DOCUMENTS, 21)
    assert row.cu_seqlens.tolist() == [0, 5, 8, 16, 17, 21]
    assert row.input_ids.tolist() == [TOKENS]
    assert row.labels[0].tolist() == [1, 2, 3, 4, -100, 11, 12, -100, *range(21, 28), -100, -100, 41, 42, 43, -100]


@pytest.mark.parametrize("T", range(1, 24))
def test_rows_hold_every_token_once_and_no_label_crosses_a_document(T):
    rows = [pack(DOCUMENTS, T, start) for start in range(0, len(TOKENS), T)]
    assert [t for row in rows for t in row.input_ids[0].tolist()] == TOKENS
    labels = [t for row in rows for t in row.labels[0].tolist()]
    last = set((DOCUMENTS.offsets[1:] - 1).tolist())
    assert labels == [-100 if t in last else TOKENS[t + 1] for t in range(len(TOKENS))]
    for row in rows:
        assert row.cu_seqlens[0] == 0 and row.cu_seqlens[-1] == row.input_ids.shape[1]
        assert (row.cu_seqlens.diff() > 0).all()


def test_a_row_starts_anywhere_in_the_text():
    row = pack(DOCUMENTS, 6, start=6)
    assert row.input_ids.tolist() == [TOKENS[6:12]]
    assert row.cu_seqlens.tolist() == [0, 2, 6]
    assert row.labels[0].tolist() == [12, -100, 21, 22, 23, 24]


def test_a_row_outside_the_text_is_refused():
    with pytest.raises(ValueError, match="at least one token, got T = 0"):
        pack(DOCUMENTS, 0)
    with pytest.raises(ValueError, match="0 to 20, got 21"):
        pack(DOCUMENTS, 4, start=21)


def test_windows_are_a_function_of_seed_and_step(corpus):
    a, b = windows(corpus, 1, 2, 4, 32), windows(corpus, 1, 2, 4, 32)
    assert torch.equal(a.input_ids, b.input_ids)
    assert not torch.equal(a.input_ids, windows(corpus, 1, 3, 4, 32).input_ids)
    assert not torch.equal(a.input_ids, windows(corpus, 2, 2, 4, 32).input_ids)
    assert torch.equal(a.input_ids[:2], windows(corpus, 1, 2, 2, 32).input_ids)
    assert torch.equal(a.input_ids[:, 1:], a.labels[:, :-1])
    assert a.input_ids.dtype == a.labels.dtype == torch.int64


def test_windows_stay_on_their_side(corpus):
    for row in windows(corpus, 0, 0, 4, 64).input_ids:
        assert decode_bytes(row) in decode_bytes(corpus.train.tokens)
    for row in held_out_text(corpus, 0, 4, 64).input_ids:
        assert decode_bytes(row) in decode_bytes(corpus.held_out.tokens)


def test_a_window_longer_than_the_text_names_both_lengths(corpus):
    n = len(corpus.held_out.tokens)
    with pytest.raises(ValueError, match=rf"{n + 1} tokens in a row are needed, but this side has only {n}"):
        held_out_text(corpus, 0, 1, n)


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("T", [3, 8, 21])
def test_cuts_are_counted_from_a_documents_start(T, cut):
    starts = DOCUMENTS.offsets.tolist()
    expected = {place for a, b in itertools.pairwise(starts) for place in range(a, b, cut)}
    for start in range(0, len(TOKENS), T):
        row, uncut = pack(DOCUMENTS, T, start, cut), pack(DOCUMENTS, T, start)
        end = start + row.input_ids.shape[1]
        inside = {place for place in expected if start < place < end}
        assert (row.cu_seqlens + start).tolist() == sorted({start, end} | inside)
        assert torch.equal(row.labels, uncut.labels)


def test_long_documents_are_stretches_of_one_document_each_and_the_starts_come_first():
    corpus = Corpus(DOCUMENTS, DOCUMENTS, byte_tokenizer(), {})
    batch = long_documents(corpus, 5, 2)  # of 5, 3, 8, 1, 4 tokens: 2, 1, 3, 0 and 1 stretches of 2 with a next token
    assert batch.input_ids.tolist() == [[0, 1], [10, 11], [20, 21], [40, 41], [2, 3]]
    assert torch.equal(batch.labels, batch.input_ids + 1)
    with pytest.raises(ValueError, match=r"8 stretches of 2 tokens .* have 7 \(the longest has 8 tokens\)"):
        long_documents(corpus, 8, 2)
