"""Sentences made of numbers: every number and every name in them is the known one."""

import pytest

from needlework.report.words import best, count, percent, size, summary


def results(*mixers, lengths=(256, 2048)):
    """Of (title, state bytes, shares of the single needle by length)."""
    return {
        "train_length": 256,
        "lengths": list(lengths),
        "mixers": [
            {
                "title": title,
                "state_bytes": {str(T): state for T in lengths},
                "needle": {str(T): {"accuracy": share} for T, share in zip(lengths, shares, strict=True)},
            }
            for title, state, shares in mixers
        ],
    }


def test_of_mixers_with_the_smallest_state_the_one_that_reached_the_figure_is_named():
    """The other of the two found 53.1 %, and was named beside it."""
    said = summary(results(("GDN", 1024, (0.5, 0.625)), ("Q-Delta", 1024, (1.0, 0.531)), ("Softmax", 4096, (1.0, 0.25))))
    assert said == (
        "Asked for a single needle at 1× the training length, the best finds 100 % of the digits (Q-Delta and Softmax); "
        "at 8×, 62.5 % (GDN); with the smallest state there, 1 KiB, the best finds 62.5 % (GDN)."
    )


def test_mixers_that_tie_are_all_named_or_counted():
    tied = [(f"M{i}", 64 + (i == 4), (0.5, 0.25)) for i in range(5)]
    assert summary(results(*tied[:3])).endswith("64 B, the best finds 25 % (M0, M1 and M2).")
    assert summary(results(*tied)).endswith(
        "at 8×, 25 % (5 mixers); with the smallest state there, 64 B, the best finds 25 % (4 mixers)."
    )


def test_one_mixer_one_length_and_none_have_their_sentences():
    assert summary(results()) == "No mixer has finished yet."
    assert summary(results(("A", 8, (0.0,)), lengths=(512,))) == (
        "Asked for a single needle at 2× the training length, the best finds 0 % of the digits (A); "
        "with the smallest state there, 8 B, the best finds 0 % (A)."
    )


def test_the_best_is_of_the_length_that_is_asked_for():
    mixers = results(("A", 8, (0.9, 0.1)), ("B", 8, (0.2, 0.3)))["mixers"]
    assert best(mixers, "needle", 256) == ("90 %", "A") and best(mixers, "needle", 2048) == ("30 %", "B")


@pytest.mark.parametrize(
    "share, said",
    [
        (1, "100 %"),
        (0.9531, "95.3 %"),
        (0.5, "50 %"),
        (0, "0 %"),
        (0.9996, "> 99.9 %"),
        (0.0004, "< 0.1 %"),
        (0.9994, "99.9 %"),
    ],
)
def test_only_all_is_a_hundred_per_cent_and_only_nothing_is_none(share, said):
    assert percent(share) == said


@pytest.mark.parametrize("number, said", [(0, "0"), (999, "999"), (59_764_296, "59.8M"), (999_700, "1000K"), (2e15, "2000T")])
def test_counts_are_told_in_decimal_units(number, said):
    assert count(number) == said


@pytest.mark.parametrize(
    "number, said",
    [(64, "64 B"), (512, "512 B"), (1023, "1023 B"), (16_384, "16 KiB"), (70_152, "68.5 KiB"), (1010 * 1024, "1010 KiB"), (2 << 20, "2 MiB"), (4_942_000, "4.71 MiB")],
)  # fmt: skip
def test_bytes_are_told_in_binary_units(number, said):
    assert size(number) == said


def test_the_smallest_state_is_that_of_the_longest_length():
    """B's grows from 8 to 64 bytes; A holds 16 throughout."""
    grown = results(("A", 16, (0.1, 0.2)), ("B", 8, (0.3, 0.4)))
    grown["mixers"][1]["state_bytes"]["2048"] = 64
    assert summary(grown).endswith("with the smallest state there, 16 B, the best finds 20 % (A).")
