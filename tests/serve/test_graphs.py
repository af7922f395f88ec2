"""Sizes of graphs: every number of rows and of tokens has one, and padding stays small."""

from needlework.serve.graphs import rows, tokens


def test_every_number_has_a_graph_that_holds_it():
    for n in range(1, 8193):
        assert n <= tokens(n) < n + max(64, n / 4) and tokens(tokens(n)) == tokens(n)
        assert n <= rows(n) < n + 16 and rows(rows(n)) == rows(n)
    assert len({tokens(n) for n in range(1, 8193)}) == 24


def test_few_rows_are_hardly_padded():
    assert [rows(n) for n in (1, 2, 3, 5, 8, 9, 17)] == [1, 2, 4, 8, 8, 16, 32]
