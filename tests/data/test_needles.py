"""Compact needles: every query is answerable from what precedes it, and targets sit on its digits."""

import re

import pytest
import torch

from needlework.data import CorpusConfig, NeedleMix, byte_tokenizer, decode_bytes, load_corpus, many_needles, single_needle

NEEDLE = re.compile(rb"\n#@([a-z]{2})=(\d{4})\n")


def row_text(inputs, labels):
    """The bytes of the T + 1 tokens that a row was made of, without ends of text."""
    return decode_bytes(torch.cat([inputs, labels[-1:]]))


@pytest.mark.parametrize("T", [64, 128, 256])
def test_dense_rows_are_pairs_and_then_queries_of_these_pairs(corpus, T):
    batch = NeedleMix(dense=1, sparse=0).batch(corpus, 0, 0, 64, T)
    counts = set()
    for inputs, labels in zip(*batch, strict=True):
        found = NEEDLE.findall(row_text(inputs, labels))
        pairs = len(dict(found))
        counts.add(pairs)
        assert len(found) == (T + 1) // 11
        assert len({key for key, _ in found[:pairs]}) == pairs  # distinct keys first
        assert set(found[pairs:]) == set(found[:pairs])  # then all of them again, with their values
    assert min(counts) == 2 and max(counts) == min(10, (T + 1) // 22)


def test_sparse_rows_ask_every_pair_twice_in_text(corpus):
    batch = NeedleMix(dense=0, sparse=1).batch(corpus, 0, 0, 64, 300)
    counts = set()
    for inputs, labels in zip(*batch, strict=True):
        row = row_text(inputs, labels)
        found = NEEDLE.findall(row)
        assert len(dict(found)) == len(set(found)) == len(found) // 3
        assert all(found.count(pair) == 3 for pair in found)
        assert NEEDLE.sub(b"", row) in decode_bytes(corpus.train.tokens)
        counts.add(len(found) // 3)
    assert counts == set(range(1, 7))


def test_the_shares_of_the_mix_are_what_the_config_says(corpus):
    batch = NeedleMix(dense=0.5, sparse=0.3).batch(corpus, 0, 0, 1000, 128)
    rows = [NEEDLE.findall(row_text(*row)) for row in zip(*batch, strict=True)]
    dense = sum(len(found) == 11 for found in rows)
    plain = sum(not found for found in rows)
    sigma = (1000 * 0.5 * 0.5) ** 0.5
    assert abs(dense - 500) < 4 * sigma
    assert abs(plain - 200) < 4 * sigma


def test_labels_are_the_next_tokens(corpus):
    inputs, labels = NeedleMix().batch(corpus, 0, 0, 16, 128)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert (labels >= 0).all()
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.is_contiguous() and labels.is_contiguous()


@pytest.mark.parametrize("n", [1, 4])
def test_needles_asked_at_the_end_can_be_answered_and_their_digits_are_scored(corpus, n):
    T = 200
    episodes = many_needles(corpus, 0, 20, T, n)
    scored = episodes.targets[:, :-1] >= 0
    assert torch.equal(episodes.input_ids[:, 1:][scored], episodes.targets[:, :-1][scored])
    orders = set()
    for inputs, targets in zip(*episodes, strict=True):
        row = decode_bytes(inputs) + b"\n"  # the last needle's newline is never an input
        found = NEEDLE.findall(row)
        assert len(found) == 2 * n and len(dict(found)) == n
        assert set(found[n:]) == set(found[:n])
        assert decode_bytes(targets[targets >= 0]) == b"".join(value for _, value in found[n:])
        assert row.endswith(b"".join(b"\n#@%b=%b\n" % pair for pair in found[n:]))
        orders.add(tuple(found[:n].index(pair) for pair in found[n:]))
    assert n == 1 or len(orders) > 1


def test_depth_places_the_needle(corpus):
    for depth, place in ((0.0, 0), (0.5, 80), (1.0, 159)):
        inputs, _ = single_needle(corpus, 0, 2, 180, depth)
        for row in inputs:
            assert abs(decode_bytes(row).index(b"\n#@") - place) <= 1
    places = {decode_bytes(row).index(b"\n#@") for row in single_needle(corpus, 0, 20, 180)[0]}
    assert len(places) > 10


def test_evaluation_text_is_held_out(corpus):
    for row in single_needle(corpus, 0, 8, 300)[0]:
        assert NEEDLE.sub(b"", decode_bytes(row) + b"\n") in decode_bytes(corpus.held_out.tokens)


def test_episodes_that_do_not_fit_are_refused_with_the_length_they_need(corpus):
    with pytest.raises(ValueError, match="T = 42 is too short for the smallest episode, which needs 43"):
        NeedleMix().batch(corpus, 0, 0, 1, 42)
    with pytest.raises(ValueError, match="4 pairs and their queries need T >= 87, got T = 86"):
        many_needles(corpus, 0, 1, 86)
    with pytest.raises(ValueError, match="depth"):
        single_needle(corpus, 0, 1, 100, 1.5)


def test_rows_want_as_much_training_text_as_they_may_take(folder):
    """As long as they are where some are plain text, less beside needles."""
    small = load_corpus(CorpusConfig(kind="files", paths=(folder / "file00.txt",), held_out=0.2), byte_tokenizer())
    T = len(small.train.tokens)
    for episodes in ({"dense": 1, "sparse": 0}, {"dense": 0.25, "sparse": 0.75}, {"dense": 0, "sparse": 1}):
        assert NeedleMix(**episodes).batch(small, 0, 0, 8, T).input_ids.shape == (8, T)
    for some_text in ({"dense": 0.25, "sparse": 0.5}, {"dense": 0, "sparse": 0.75}, {"dense": 0.75, "sparse": 0}):
        with pytest.raises(ValueError, match=f"a row of T = {T} may take {T + 1} tokens of text, the training text has {T}"):
            NeedleMix(**some_text).batch(small, 0, 0, 8, T)
        NeedleMix(**some_text).check(small, T - 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense": 0.8, "sparse": 0.3}, r"needles: dense \+ sparse is 0.8 \+ 0.3, expected at most 1"),
        ({"dense": -0.1}, r"needles: dense is -0.1, expected a number in \[0, 1\]"),
        ({"dense_pairs": (3, 2)}, "dense_pairs"),
        ({"sparse_pairs": (0, 2)}, "sparse_pairs"),
        ({"asks": 0}, "asks"),
    ],
)
def test_a_wrong_mix_says_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        NeedleMix(**settings)
