"""The rows of a product that stay quick cover it."""

from itertools import combinations, product

from needlework.testing.rows import chosen, covering

AXES = ("ab", (0, 1, 2), (None, 5))


def quick(rows):
    return {row.values for row in rows if not row.marks}


def test_every_pair_of_values_is_in_a_quick_row_and_no_row_is_lost():
    rows = covering(*AXES)
    assert [row.values for row in rows] == list(product(*AXES))
    for i, j in combinations(range(3), 2):
        assert {(row[i], row[j]) for row in quick(rows)} == set(product(AXES[i], AXES[j]))
    assert len(quick(rows)) == 6


def test_every_value_alone_takes_as_many_rows_as_the_longest_axis():
    assert [len(quick(covering(*AXES, pairs=False))), len(quick(covering((1, 2))))] == [3, 2]


def test_rows_that_are_not_chosen_are_slow():
    assert quick(chosen((1, 2, 3), quick=(3, 1))) == {(1,), (3,)}
    assert quick(chosen(product((1, 2), "a"), quick=((2, "a"),))) == {(2, "a")}
