"""Ranks for tests: what each returned, or the output of the one that failed."""

import pytest
import torch
import torch.distributed as dist

from needlework.testing.ranks import ranks


def main(failing="none"):
    if str(dist.get_rank()) == failing:
        raise KeyError("lost its key")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)  # waits for ever if the others are gone
    return dist.get_rank(), total.item()


def test_each_rank_returns_its_own():
    assert ranks(3, main) == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_that_fails_ends_the_others_and_is_told():
    with pytest.raises(RuntimeError, match=r"(?s)2 ranks of .*rank 1: Traceback.*lost its key"):
        ranks(2, main, "1")
