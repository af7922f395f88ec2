"""The optimisers against spec/polar.md, "Optimiser", and against their own rules of who gets what."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from needlework.train import AdamW, Muon

PUBLISHED = Muon(
    lr=0.02,
    weight_decay=0.01,
    momentum=0.95,
    coefficients=(2.0, -1.5, 0.5),
    ns_steps=12,
    rest=AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, rates=(("*embed*", 0.3), ("head.weight", 1 / 320))),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 4, groups=8)
        self.v_null = nn.Parameter(torch.zeros(2, 4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16, bias=False)


def named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: group for group in optimizer.param_groups for p in group["params"]}


def newton_schulz(update, dtype):
    x = update.to(dtype)
    x = x / x.norm()
    for _ in range(12):
        gram = x @ x.T
        x = 2 * x - 1.5 * (gram @ x) + 0.5 * (gram @ (gram @ x))
    return x


def published_muon(weight, gradients, dtype):
    """spec/polar.md, word for word, in float64; the Newton–Schulz steps in `dtype`."""
    weight, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    rows, cols = weight.shape
    for gradient in gradients:
        m = torch.lerp(m, gradient.double(), 0.05)
        update = torch.lerp(gradient.double(), m, 0.95)
        orthogonal = newton_schulz(update, dtype).double()
        weight = (1 - 0.02 * 0.01) * weight - 0.02 * math.sqrt(max(1, rows / cols)) * orthogonal
    return weight


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128)])
def test_muon_is_the_published_formula(shape):
    """Within twice the error that the formula itself makes with its Newton–Schulz steps in bfloat16."""
    torch.manual_seed(0)
    ours, own = 0.0, 0.0
    for _ in range(3):
        start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
        weight = nn.Parameter(start.clone())
        (optimizer,) = Muon(lr=0.02, rest=AdamW(lr=0.01)).build([("blocks.0.weight", weight)])
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        exact = published_muon(start, gradients, torch.float64)
        ours += (weight.double() - exact).square().sum().item()
        own += (published_muon(start, gradients, torch.bfloat16) - exact).square().sum().item()
    assert math.sqrt(ours) <= 2 * math.sqrt(own)


def test_the_published_settings_reach_every_parameter():
    model = Model()
    muon, adamw = PUBLISHED.build(model.named_parameters())
    assert set(named_groups(model, muon)) == {"blocks.0.proj.weight", "blocks.1.proj.weight"}
    (group,) = muon.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"]) == (0.02, 0.01, 0.95, True)
    assert (group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"]) == ((2.0, -1.5, 0.5), 12, "original")

    rest = named_groups(model, adamw)
    assert rest.keys() == dict(model.named_parameters()).keys() - named_groups(model, muon).keys()
    assert {name: group["lr"] for name, group in rest.items() if group["lr"] != 0.01} == {
        "embed.weight": 0.3,
        "head.weight": 1 / 320,
    }
    assert {(g["betas"], g["eps"], g["weight_decay"]) for g in rest.values()} == {((0.8, 0.95), 1e-10, 0.0)}


def test_adamw_decays_what_has_two_axes_and_is_no_embedding():
    model = Model()
    (adamw,) = AdamW(lr=1e-3, weight_decay=0.1).build(model.named_parameters())
    decayed = {name for name, group in named_groups(model, adamw).items() if group["weight_decay"] == 0.1}
    of_a_block = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("proj.weight", "conv.weight", "v_null")}
    assert decayed == of_a_block | {"head.weight"}


def test_a_frozen_parameter_belongs_to_no_optimiser():
    model = Model()
    model.blocks[0].requires_grad_(False)
    muon, adamw = PUBLISHED.build(model.named_parameters())
    names = named_groups(model, muon).keys() | named_groups(model, adamw).keys()
    assert not any(name.startswith("blocks.0") for name in names)


def test_a_rate_for_a_parameter_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"rates: no parameter is named \*embd\*"):
        AdamW(lr=1e-3, rates=(("*embd*", 0.3),)).build(Model().named_parameters())


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(ValueError, match="muon: no trainable parameter"):
        PUBLISHED.build([("embed.weight", nn.Parameter(torch.zeros(4, 4)))])


@pytest.mark.parametrize(
    ("optimiser", "field", "value"),
    [
        ("adamw", "lr", -1.0),
        ("adamw", "lr", math.nan),
        ("adamw", "lr", math.inf),
        ("adamw", "lr", "1e-3"),
        ("adamw", "lr", True),
        ("adamw", "betas", (0.9,)),
        ("adamw", "betas", (0.9, 0.95, 0.99)),
        ("adamw", "betas", 0.9),
        ("adamw", "betas", (0.9, 1.0)),
        ("adamw", "betas", (-0.1, 0.9)),
        ("adamw", "eps", -1e-8),
        ("adamw", "weight_decay", -0.1),
        ("adamw", "weight_decay", math.nan),
        ("adamw", "undecayed", "*embed*"),
        ("adamw", "rates", (("*embed*",),)),
        ("adamw", "rates", (("*embed*", -0.3),)),
        ("adamw", "rates", 0.3),
        ("muon", "lr", math.nan),
        ("muon", "weight_decay", -1.0),
        ("muon", "momentum", 1.0),
        ("muon", "coefficients", (2.0, -1.5)),
        ("muon", "coefficients", (2.0, -1.5, math.inf)),
        ("muon", "ns_steps", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(optimiser, field, value):
    config = PUBLISHED if optimiser == "muon" else PUBLISHED.rest
    with pytest.raises(ValueError, match=rf"^{optimiser}: {field} is .*, expected "):
        replace(config, **{field: value})


def test_settings_at_the_ends_of_their_ranges_are_taken():
    AdamW(lr=0.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0, undecayed=(), rates=[["*embed*", 0]])
    Muon(lr=1, rest=PUBLISHED.rest, momentum=0.0, ns_steps=1)
