"""Marked answers: each can be read off its telling, at the distance that is said, and overwritten keys answer with their last value."""

import math
import re

import numpy as np
import pytest
import torch

from needlework.data import ASKED, PAIRED, NeedleMix, RecallMix
from needlework.data.recall import _log_uniform

NEEDLE = re.compile(rb"\n#([@!])([a-z]{2})=(\d{4})\n")
OVERWRITING = RecallMix(sparse=1.0, overwritten=0.5, sparse_pairs=(3, 6))


def read(ids):
    """The bytes of a row's tokens; an end of text is a byte too, so that places are tokens'."""
    return bytes(min(t, 255) for t in ids.tolist())


def rows(batch):
    """(bytes of the T + 1 tokens, for each of them what its answer is)."""
    for ids, labels, answers, _ in zip(*batch, strict=True):
        yield read(torch.cat([ids, labels[-1:]])), [0, *answers.tolist()]


def expected(row):
    """(place of a digit, its distance, overwritten) of every needle that repeats its key's last value, by reading the row."""
    told, found = {}, {}
    for needle in NEEDLE.finditer(row):
        mark, key, value = needle.groups()
        if mark == b"!":
            assert key in told and told[key][0] != value  # there was a value, and it was another
            told[key] = (value, needle.start(), True)
        elif key not in told:
            told[key] = (value, needle.start(), False)
        else:
            assert told[key][0] == value
            for i in range(4):
                found[needle.start(3) + i] = (needle.start() - told[key][1], told[key][2])
    return found


@pytest.mark.parametrize(
    "mix, kind", [(RecallMix(dense=1.0, sparse=0.0), PAIRED), (RecallMix(sparse=1.0), ASKED), (OVERWRITING, ASKED)]
)
def test_the_marked_tokens_are_the_digits_that_a_telling_before_them_says(corpus, mix, kind):
    many = 0
    for row, answers in rows(mix.batch(corpus, 0, 0, 24, 600)):
        assert len(row) == 601
        assert [place for place, answer in enumerate(answers) if answer] == sorted(expected(row))
        assert {answer for answer in answers if answer} == {kind}
        many += len(expected(row))
    assert many > 24 * 8


def test_distances_and_overwrites_are_those_of_the_row(corpus):
    ids, targets, distance, overwritten = OVERWRITING.scored(corpus, 1, 30, 600)
    shares = []
    for b in range(30):
        scored = targets[b] != -100
        row = read(torch.cat([ids[b], torch.tensor([10])]))
        assert torch.equal(ids[b, 1:][scored[:-1]], targets[b, :-1][scored[:-1]])
        found = {place - 1: told for place, told in expected(row).items()}
        assert found == {t: (int(distance[b, t]), bool(overwritten[b, t])) for t in scored.nonzero().flatten().tolist()}
        assert NEEDLE.sub(b"", row)[:-1] in bytes(min(t, 255) for t in corpus.held_out.tokens.tolist())
        shares += [over for _, over in found.values()]
    assert abs(np.mean(shares) - 0.5) < 0.15


def test_lags_are_log_uniform():
    """As many between 8 and 16 as between 128 and 256: of 10,000 draws each octave has its share within four standard errors."""
    drawn = _log_uniform(np.random.default_rng(0), 1023, 10_000)
    assert drawn.min() == 1 and drawn.max() == 1023
    for octave in range(10):
        count = ((drawn >= 2**octave) & (drawn < 2 ** (octave + 1))).sum()
        assert abs(count - 1000) < 4 * math.sqrt(10_000 * 0.1 * 0.9)


def test_only_answers_in_text_have_an_emphasis(corpus):
    mix = RecallMix(dense=0.4, sparse=0.4, weight=5.0)
    *_, answers, emphasis = mix.batch(corpus, 0, 0, 32, 300)
    assert {(a, e) for a, e in zip(answers.flatten().tolist(), emphasis.flatten().tolist(), strict=True)} == {
        (0, 1),
        (PAIRED, 1),
        (ASKED, 5),
    }


def test_a_row_is_a_function_of_its_number_and_short_rows_hold_what_fits(corpus):
    whole, part = OVERWRITING.batch(corpus, 3, 7, 6, 300), OVERWRITING.batch(corpus, 3, 7, 6, 300, range(2, 4))
    assert all(torch.equal(a[2:4], b) for a, b in zip(whole, part, strict=True))
    for T in (32, 43, 44, 60):
        for row, answers in rows(RecallMix(sparse=1.0, overwritten=1.0, dense_pairs=(1, 2)).batch(corpus, 0, 0, 20, T)):
            assert [place for place, answer in enumerate(answers) if answer] == sorted(expected(row)) and len(row) == T + 1
    with pytest.raises(ValueError, match="T = 31 is too short for the smallest episode, which needs 32"):
        RecallMix(sparse=1.0, dense_pairs=(1, 2)).batch(corpus, 0, 0, 1, 31)


def test_the_shares_are_those_of_the_first_studys_mix(corpus):
    """The same three kinds of rows; the dense ones are made alike."""
    kinds = [max(answers) for _, answers in rows(RecallMix(dense=0.5, sparse=0.3).batch(corpus, 0, 0, 400, 128))]
    for kind, share in ((PAIRED, 0.5), (ASKED, 0.3), (0, 0.2)):
        assert abs(kinds.count(kind) - 400 * share) < 4 * math.sqrt(400 * share * (1 - share))
    assert issubclass(RecallMix, NeedleMix)
