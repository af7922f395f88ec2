"""Muon with owners is torch.optim.Muon, with two collectives for as many matrices as there are ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from needlework.testing.ranks import ranks
from needlework.train.muon import Muon, _rounds

SHAPES = [(8, 8), (7, 12), (12, 7), (1, 6), (16, 4), (5, 5), (33, 2)]  # also fewer rows than ranks, rows that do not divide
SETTINGS = {
    "nesterov": {"lr": 0.02, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 12, "adjust_lr_fn": "original"},
    "plain": {"lr": 0.1, "nesterov": False, "momentum": 0.9, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
}
STEPS = 3
PLACES = [Shard(0), Shard(1), Replicate()]


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def expected(settings):
    """Weights and momenta of torch.optim.Muon on one rank."""
    params = [nn.Parameter(x) for x in numbers(0)]
    muon = torch.optim.Muon(params, **SETTINGS[settings])
    for step in range(STEPS):
        for p, gradient in zip(params, numbers(1 + step), strict=True):
            p.grad = gradient
        muon.step()
    return [p.detach() for p in params], [muon.state[p]["momentum_buffer"] for p in params]


def sharded(mesh, placements, kind, count=None, **settings):
    params = [nn.Parameter(distribute_tensor(x, mesh, placements)) for x in numbers(0)[:count]]
    muon, seen = kind(params, **settings), []
    for step in range(STEPS):
        for p, gradient in zip(params, numbers(1 + step), strict=False):
            p.grad = distribute_tensor(gradient, mesh, placements)
        with CommDebugMode() as collectives:
            muon.step()
        seen.append({str(op).split(".")[-1]: n for op, n in collectives.get_comm_counts().items()})
    buffers = [muon.state[p]["momentum_buffer"] for p in params]
    assert all(m.placements == p.placements for m, p in zip(buffers, params, strict=True))
    return params, buffers, seen


def whole(params, buffers, seen):
    return [p.detach().full_tensor() for p in params], [m.full_tensor() for m in buffers], seen


class Spread(nn.Module):
    """What tensor parallelism leaves to FSDP2: matrices sharded by rows, by columns, and copied."""

    def __init__(self, mesh):
        super().__init__()
        rows, columns, copies = (distribute_tensor(numbers(0)[i], mesh, [place]) for i, place in enumerate(PLACES))
        self.rows, self.columns, self.copies = nn.Parameter(rows), nn.Parameter(columns), nn.Parameter(copies)


def under_fsdp():
    """Three of the matrices on a mesh of two axes, as `fully_shard` places them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tensor"))
    spread = fully_shard(Spread(mesh["tensor"]), mesh=mesh["dp"])
    params = list(spread.parameters())
    muon = Muon(params, **SETTINGS["nesterov"])
    for step in range(STEPS):
        for p, gradient in zip(params, numbers(1 + step), strict=False):
            p.grad = distribute_tensor(gradient, mesh, [Replicate(), Replicate()]).redistribute(mesh, p.placements)
        muon.step()
    return [p.full_tensor() for p in params], [muon.state[p]["momentum_buffer"].full_tensor() for p in params]


def refused(mesh):
    p = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    p.grad = p.detach()
    with pytest.raises(ValueError) as caught:
        Muon([p]).step()
    return str(caught.value)


def main():
    found = {}
    for world in (2, 3):
        mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("dp",))
        if dist.get_rank() < world:
            for name, settings in SETTINGS.items():
                found[world, name] = whole(*sharded(mesh, [Shard(0)], Muon, **settings))
            found[world, "columns"] = whole(*sharded(mesh, [Shard(1)], Muon, **SETTINGS["nesterov"]))
            found[world, "copies"] = whole(*sharded(mesh, [Replicate()], Muon, **SETTINGS["nesterov"]))
            found[world, "torch"] = whole(*sharded(mesh, [Shard(0)], torch.optim.Muon, 1, **SETTINGS["nesterov"]))
            found["refused"] = refused(mesh)
    found["fsdp"] = under_fsdp()
    return found


@pytest.fixture(scope="module")
def found():
    return ranks(4, main)


def same(found, expected):
    for kind in (0, 1):
        for a, b in zip(found[kind], expected[kind], strict=False):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_sharded_rows_give_the_weights_and_momenta_of_one_rank(found, name, world):
    for rank in range(world):
        same(found[rank][world, name], expected(name))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("placed", ["columns", "copies"])
def test_matrices_may_be_placed_otherwise(found, placed, world):
    same(found[0][world, placed], expected("nesterov"))


def test_fsdp_over_tensor_parallel_matrices_gives_the_weights_of_one_rank(found):
    for rank in range(4):
        assert len(found[rank]["fsdp"][0]) == 3
        same(found[rank]["fsdp"], expected("nesterov"))


@pytest.mark.parametrize("world", [2, 3])
def test_as_many_matrices_as_ranks_take_two_collectives(found, world):
    for rank in range(world):
        for seen in found[rank][world, "nesterov"][2]:
            assert seen == {"alltoall_base_": 2 * math.ceil(len(SHAPES) / world)}
        assert sum(found[rank][world, "torch"][2][0].values()) > 24  # one matrix otherwise, in 12 Newton–Schulz steps


def test_without_a_distributed_parameter_it_is_torchs_own():
    params = [nn.Parameter(x) for x in numbers(0)]
    muon = Muon(params, **SETTINGS["plain"])
    for step in range(STEPS):
        for p, gradient in zip(params, numbers(1 + step), strict=True):
            p.grad = gradient
        muon.step()
    weights, momenta = expected("plain")
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    assert all(torch.equal(muon.state[p]["momentum_buffer"], m) for p, m in zip(params, momenta, strict=True))


def test_owners_share_the_work_evenly():
    shapes = [torch.Size(s) for s in [(768, 768)] * 4 * 12 + [(2048, 768)] * 3 * 12]
    rounds = _rounds(shapes, 8)
    assert sorted(i for owners in rounds for i in owners.values()) == list(range(84)) and len(rounds) == 11
    load = [sum(max(shapes[r[o]]) * min(shapes[r[o]]) ** 2 for r in rounds if o in r) for o in range(8)]
    assert max(load) <= 1.1 * sum(load) / 8


def test_a_gradient_that_is_not_yet_summed_is_refused(found):
    assert found[0]["refused"] == "muon: a matrix [2, 2] is placed (Partial(sum),), expected Shard or Replicate"
