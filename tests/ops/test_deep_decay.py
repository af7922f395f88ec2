"""Log decays however deep, −∞ included, against the definition: e^g is 0 there, and no gate beside one loses a digit."""

import pytest
import torch

from needlework.ops.carve.op import chunk_carve, recurrent_carve
from needlework.ops.common.decay import NOTHING
from needlework.ops.specs import specs
from needlework.testing.compare import assert_close, differentiate, leaves, make, tokens, whole
from needlework.testing.rows import chosen

DEPTHS = (-30.0, -1e3, -1e12, -1e20, -torch.inf)
GATED = [spec for spec in specs() if "g" in spec.tokens]
T = 83


def deep(g: torch.Tensor, depth: float | None = None) -> torch.Tensor:
    """Tiny gates, among them `depth`, or of every depth one after the other: first, last, and on both sides of every border of a chunk."""
    g = g / 1e3
    at = [t for border in range(0, g.shape[1] + 1, 16) for t in (border - 1, border, border + 5) if 0 <= t < g.shape[1]]
    for i, t in enumerate([*at, g.shape[1] - 1]):
        # of a channel gate all channels, or every second one
        row = g[:, t] if g.dim() == 3 or i % 2 else g[:, t, :, ::2]
        row.fill_(DEPTHS[i % len(DEPTHS)] if depth is None else depth)
    return g


# every depth one after the other, and the deepest alone
@pytest.mark.parametrize("depth", chosen((*DEPTHS, None), (-torch.inf, None)))
@pytest.mark.parametrize("spec", GATED, ids=lambda spec: spec.name)
def test_the_chunk_form_is_the_recurrence_with_every_gradient(spec, depth):
    inputs = make(spec, 1, T)
    inputs["g"] = deep(inputs["g"], depth)
    want = differentiate(whole(spec.recurrent), inputs)
    for chunk_size in {spec.chunk_sizes[0], 64}:
        got = differentiate(whole(spec.chunk, chunk_size=chunk_size), inputs)
        for ours, exact in zip(got, want, strict=True):
            assert_close(ours, exact, f"{depth}, chunks of {chunk_size}")
    gone = torch.where(inputs["g"] <= NOTHING, got[1]["dg"], 0)
    assert not gone.any(), "a gate whose e^g is 0 has a gradient"


# "previous" and "given" erase what the state held before it was wiped, the released kernels' coupling counts chunks from the start, and
# Mamba-3's angle goes on: its reads are compared in test_mamba3.py. PaTH's state keeps the rows that are forgotten
ELSE = ("delta/previous", "delta/given", "qdelta/transposed", "mamba3", "mamba3/mimo", "path/fox")


@pytest.mark.parametrize("spec", [spec for spec in GATED if spec.name not in ELSE], ids=lambda spec: spec.name)
def test_a_wiped_state_is_as_if_it_had_never_been(spec):
    inputs = make(spec, 1, T)
    inputs["g"][:, 40] = -torch.inf
    after = lambda inputs: tokens(spec, inputs, lambda x: x[:, 40:])
    both, alone = (dict(leaves(whole(spec.chunk)(x))) for x in (inputs, after(inputs)))
    for name, x in alone.items():
        assert_close({name: both[name][:, 40:] if x.shape[1] == T - 40 else both[name]}, {name: x}, "after the wipe")


@pytest.mark.parametrize("spec", [spec for spec in GATED if "step_is_prefill" not in spec.skip], ids=lambda spec: spec.name)
def test_a_step_takes_any_depth(spec):
    inputs = make(spec, 1, 21)
    inputs["g"] = deep(inputs["g"])
    want, table = dict(leaves(spec.chunk(**inputs))), spec.table(1)
    for t in range(21):
        got = spec.step(**tokens(spec, inputs, lambda x, t=t: x[:, t]), state=table)
        for (name, x), y in zip(want.items(), leaves((got,)), strict=True):
            assert_close({name: y[1]}, {name: x[:, t]}, f"token {t}")


@pytest.mark.parametrize("spec", GATED, ids=lambda spec: spec.name)
def test_a_gate_that_is_no_number_is_not_taken_for_a_deep_one(spec):
    inputs = make(spec, 1, 21)
    inputs["g"][:, 7] = torch.nan
    assert all(x.isnan().any() for _, x in leaves(spec.chunk(**inputs)))


@pytest.mark.parametrize("prediction", ("previous", "decayed"))
def test_carve_computes_gates_of_any_depth(prediction):
    spec = next(spec for spec in specs() if spec.name == "carve/rank4")
    inputs = make(spec, 1, T)
    depths = -torch.tensor(DEPTHS[:-1], dtype=torch.float64)
    inputs["f"][:, :60:7] = depths.repeat(3)[:9, None, None]
    inputs["b"][:, 5::9] = depths.repeat(3)[:9, None, None]
    want = differentiate(whole(recurrent_carve, content_chunk=21, prediction=prediction), inputs)
    got = differentiate(whole(chunk_carve, content_chunk=21, prediction=prediction), inputs)
    for ours, exact in zip(got, want, strict=True):
        assert_close(ours, exact, prediction)
