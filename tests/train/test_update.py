"""Optimisers launched before the host knows the verdict: they move as if it had waited, or not at all."""

import math
from copy import deepcopy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from needlework.train import AdamW, Guard, Muon
from needlework.train.guard import FINITE, Limits, Watch
from needlework.train.losses import Addends
from needlework.train.update import Numbers, Update
from needlework.train.world import World

from .tiny import Tiny, equal

ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
MUON = Muon(lr=1e-2, rest=ADAMW)


def with_gradients() -> Tiny:
    torch.manual_seed(0)
    model = Tiny()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def kept(optimizers) -> list[torch.Tensor]:
    return [x for optimizer in optimizers for state in optimizer.state_dict()["state"].values() for x in state.values()]


def numbers(model, *losses: float) -> Numbers:
    return Numbers(model, Addends(torch.tensor(losses, dtype=torch.float64), {}), World())


def norm_of(model) -> float:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()


def test_the_host_reads_what_the_device_has():
    model = with_gradients()
    found = Addends(torch.tensor([1.5, 0.5], dtype=torch.float64), {"size": torch.tensor(3.0, dtype=torch.float64)})
    norm, loss, parts, losses = Numbers(model, found, World()).read()
    assert norm == pytest.approx(norm_of(model), rel=1e-6)
    assert (loss, parts, losses) == (2.0, {"size": 3.0}, [1.5, 0.5])


@pytest.mark.parametrize("optim", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("share", [0.1, 10.0], ids=["clipped", "short"])
def test_a_sound_step_is_that_of_a_clipped_gradient(optim, share):
    """Neither rule's step changes with the gradient's size; what it remembers of gradients does."""
    ours, theirs = with_gradients(), with_gradients()
    clip = share * norm_of(ours)
    optimizers = optim.build(ours.named_parameters())
    update = Update(optimizers, clip)
    for _ in range(3):
        here = numbers(ours, 1.0)
        update.begin(here, FINITE)
        update.finish(here.read().norm)
    literal = optim.build(theirs.named_parameters())
    for _ in range(3):
        clip_grad_norm_(theirs.parameters(), clip)
        for optimizer in literal:
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(kept(optimizers), kept(literal), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


def test_a_step_at_its_limits_is_taken_as_the_host_would():
    model = with_gradients()
    here = numbers(model, 2.0)
    norm, limits = here.read().norm, Limits(2.0, here.read().norm)
    before = deepcopy(model)
    Update(ADAMW.build(model.named_parameters()), 1.0).begin(here, limits)
    assert not equal(model, before)
    watch = Watch(Guard(spike=2.0, window=1))
    watch.took(1.0, norm / 2)
    assert watch.limits() == limits and watch.verdict(2.0, norm) is None


@pytest.mark.parametrize(
    ("loss", "factor", "limits"),
    [
        (math.nan, 1.0, FINITE),
        (math.inf, 1.0, FINITE),
        (1.0, math.nan, FINITE),
        (1.0, math.inf, FINITE),
        (2.0, 1.0, Limits(1.9, FINITE.norm)),
        (2.0, 1.0, Limits(FINITE.loss, 1.0)),
    ],
)
def test_a_step_that_is_not_sound_changes_nothing(loss, factor, limits):
    model = with_gradients()
    optimizers = ADAMW.build(model.named_parameters())
    update = Update(optimizers, 1.0)
    update.begin(numbers(model, 1.0), FINITE)  # there are moments to spoil
    for p in model.parameters():
        p.grad = factor * torch.ones_like(p)
    before, remembered = deepcopy(model), deepcopy(kept(optimizers))
    update.begin(numbers(model, loss), limits)
    assert equal(model, before)
    assert all(torch.equal(a, b) for a, b in zip(kept(optimizers), remembered, strict=True))
    assert all(torch.equal(p.grad, factor * torch.ones_like(p)) or math.isnan(factor) for p in model.parameters())


def test_an_optimiser_that_cannot_decide_waits_for_the_host():
    model = with_gradients()
    matrices, rest = MUON.build(model.named_parameters())
    update, before = Update([matrices, rest], 1.0), deepcopy(model)
    update.begin(numbers(model, 1.0), FINITE)
    of = {id(p): name for name, p in model.named_parameters()}
    old = dict(before.named_parameters())
    moved = lambda optimizer: [not torch.equal(p, old[of[id(p)]]) for g in optimizer.param_groups for p in g["params"]]
    assert not any(moved(matrices)) and all(moved(rest))
    update.finish(norm_of(with_gradients()))
    assert all(moved(matrices))
