"""Orders are permutations that nobody holds, and ranks share a batch without a rest."""

import numpy as np
import pytest

from needlework.data import epoch_windows, rank_rows, shuffled


@pytest.mark.parametrize("n", [*range(1, 40), 64, 65, 1000, 1023, 4097])
def test_every_epoch_has_every_window_once(n):
    for epoch in range(3):
        assert sorted(shuffled(np.arange(n), n, 7, epoch)) == list(range(n))


def test_a_place_depends_on_its_index_alone():
    whole = shuffled(np.arange(1000), 1000, 3, 2)
    assert [int(shuffled(np.array([i]), 1000, 3, 2)[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_an_order_looks_drawn():
    n = 50_000
    order = shuffled(np.arange(n), n, 0, 0)
    # Of a random permutation: correlation with the identity N(0, 1/n); neighbours that stay neighbours, Poisson(1) each way.
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 5 / n**0.5
    for step in (-1, 1):
        assert (np.diff(order) == step).sum() < 10
    # Where the first tenth lands: every tenth of the places gets a tenth of it.
    counts = np.bincount(order[: n // 10] * 10 // n, minlength=10)
    assert abs(counts - n / 100).max() < 5 * (n / 100) ** 0.5


def test_more_windows_than_a_list_could_hold_cost_nothing():
    n = 5 * 10**12
    places = shuffled(np.arange(n - 32, n), n, 0, 0)
    assert len(set(places.tolist())) == 32 and 0 <= places.min() and places.max() < n


def test_a_batch_goes_on_into_the_next_epoch():
    windows = [epoch_windows(step, 4, range(4), 10, 0) for step in range(5)]  # 20 rows: two epochs
    flat = np.concatenate(windows)
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10].tolist() != flat[10:].tolist()


@pytest.mark.parametrize(("B", "world"), [(32, 1), (32, 4), (7, 3), (5, 5)])
def test_ranks_take_every_row_once(B, world):
    shares = [rank_rows(B, rank, world) for rank in range(world)]
    assert [row for share in shares for row in share] == list(range(B))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_rows_and_ranks_outside_are_refused():
    with pytest.raises(ValueError, match="a batch of 3 rows is too small for 4 ranks"):
        rank_rows(3, 0, 4)
    with pytest.raises(ValueError, match="rank is 0 to 3 of 4 ranks, got 4"):
        rank_rows(8, 4, 4)
