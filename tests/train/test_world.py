import pytest
import torch

from needlework.train import Parallel, World


@pytest.mark.parametrize(
    "parallel, ranks, sizes",
    [
        (Parallel(), 1, (1, 1, 1)),
        (Parallel(), 8, (8, 1, 1)),
        (Parallel(sequence=2, tensor=2), 8, (2, 2, 2)),
        (Parallel(shard=1, tensor=4), 4, (1, 1, 4)),
    ],
)
def test_shard_takes_the_ranks_that_are_left(parallel, ranks, sizes):
    assert parallel.sizes(ranks) == sizes


@pytest.mark.parametrize("parallel, ranks", [(Parallel(tensor=3), 4), (Parallel(shard=2), 4), (Parallel(sequence=2), 1)])
def test_sizes_that_do_not_multiply_to_the_ranks_are_refused(parallel, ranks):
    with pytest.raises(ValueError, match=rf"{ranks} ranks?: shard × sequence × tensor must be {ranks}"):
        parallel.sizes(ranks)


@pytest.mark.parametrize("sizes", [{"shard": 0}, {"sequence": 0}, {"tensor": -1}])
def test_a_size_below_one_is_refused(sizes):
    with pytest.raises(ValueError, match=r"parallel: .* expected a whole number >= 1"):
        Parallel(**sizes)


def test_alone_there_is_no_group_and_everything_is_its_own():
    with World.open() as world:
        assert world.mesh is None and world.is_first and world.ranks == world.parts == 1 and world.part == 0
        assert world.total(3) == 3 and world.any(True) and not world.any(False)
        assert world.gather("a") == ["a"] and world.agree(lambda: 5) == 5
        x = torch.arange(6.0).view(3, 2)
        assert torch.equal(world.own(x), x) and torch.equal(world.sum_(x.clone()), x)
        world.barrier()
    assert not torch.distributed.is_initialized()
