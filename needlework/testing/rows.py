"""Rows of test parameters: of a product of axes, those that cover it are quick, the rest carries the mark `slow`."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest


def covering(*axes: Sequence, pairs: bool = True) -> list:
    """The product of the axes; without `slow` are as few rows as have every pair of values of two axes, or every value alone.

    Greedy and in the product's order, so the same rows every time. A mistake that takes three values together to be seen is found by
    the whole product alone: give such a row as a case of its own.
    """
    indices = list(product(*(range(len(axis)) for axis in axes)))
    size = min(2 if pairs else 1, len(axes))
    met = lambda row: {tuple((i, row[i]) for i in some) for some in combinations(range(len(axes)), size)}
    left = set().union(*map(met, indices))
    quick = set()
    while left:
        best = max(indices, key=lambda row: len(met(row) & left))
        quick.add(best)
        left -= met(best)
    values = ((row, tuple(axis[i] for axis, i in zip(axes, row, strict=True))) for row in indices)
    return [pytest.param(*value, marks=() if row in quick else pytest.mark.slow) for row, value in values]


def chosen(rows: Iterable, quick: Sequence) -> list:
    """All `rows`, of which those not in `quick` carry the mark `slow`."""
    rows = list(rows)
    missing = [row for row in quick if row not in rows]
    assert not missing, f"{missing} of {rows}"
    one = lambda row: row if isinstance(row, tuple) else (row,)
    return [pytest.param(*one(row), marks=() if row in quick else pytest.mark.slow) for row in rows]
