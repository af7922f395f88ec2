"""Mamba-3's kernels where the battery in the interpreter does not go: bfloat16 and its powers of two, rows of R, tables of states."""

import dataclasses
import os
from functools import partial

import pytest
import torch

from needlework.ops.mamba3.spec import SPECS
from needlework.ops.runtime.launch_configs import forced
from needlework.testing import checks
from needlework.testing.compare import make
from needlework.testing.rows import chosen

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

SISO, MIMO = (dataclasses.replace(spec, chunk=partial(spec.chunk, impl="triton")) for spec in SPECS)


def scaled(by: dict[str, float]):
    """Inputs times powers of two: in a definition without rounding they leave o by powers of two too."""
    return lambda generator, B, T, style: {name: x * by.get(name, 1) for name, x in SISO.inputs(generator, B, T, style).items()}


@pytest.mark.parametrize(
    "by",
    [
        pytest.param({"q": 2.0**12, "q_bias": 2.0**12, "k": 2.0**12, "k_bias": 2.0**12, "v": 2.0**12}, id="large"),
        pytest.param({"dt": 2.0**-20, "g": 2.0**-20}, id="small steps"),
    ],
)
def test_bfloat16_has_its_own_range(by, bfloat16_in_the_interpreter):
    """Operands are float16: products of 2²⁴ would be infinite, and writes of 2⁻²² have no digits."""
    spec = dataclasses.replace(SISO, inputs=scaled(by))
    found = checks.budgeted(spec, torch.bfloat16, 2, 40, "random", torch.device("cpu"))
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("check", [checks.chunk_is_the_recurrence, checks.gradients], ids=lambda check: check.__name__)
def test_rows_of_a_token_are_the_engines_tokens(check):
    one = dataclasses.replace(MIMO, inputs=lambda generator, B, T, style: MIMO.inputs(generator, 1, T, style))
    check(one)


def test_a_call_on_slots_is_a_call_from_states():
    """Out of order, none, fresh, and empty sequences that leave their slots as they are."""
    ends, slots, fresh = [0, 9, 9, 9, 20, 37], [4, 1, 0, -1, 2], [False, False, True, False, True]
    checks._on_slots(SPECS[0], "triton", make(SISO, 1, 37), slots, fresh, ends)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SISO, MIMO], ids=lambda spec: spec.name)
def test_every_call_on_slots(spec):
    checks.slots_hold_states(dataclasses.replace(spec, chunk=spec.chunk.func), T=37, impls=("triton",))


@pytest.mark.slow
def test_a_step_of_rows_is_the_prefill(monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    checks.step_is_prefill(MIMO)


@pytest.mark.parametrize(("pairs", "m"), chosen([(p, m) for p in ("even", "halves") for m in (1, 6)], quick=[("halves", 1)]))
def test_any_pairs_turn(pairs, m):
    """One of six, all of six; in the config of large K too."""
    settings = {"pairs": pairs}
    spec = dataclasses.replace(
        SISO, chunk=partial(SISO.chunk.func, impl="triton", **settings), recurrent=partial(SISO.recurrent, **settings),
        inputs=lambda generator, B, T, style: SISO.inputs(generator, 1, T, style) | {"angle": torch.randn(1, T, m).double()},
    )  # fmt: skip
    with forced("mamba3/siso", "plain"):
        checks.gradients(spec)
