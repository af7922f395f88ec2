"""Heads with zeros behind them, as kernels get them where their copy engine needs whole rows, in Triton's interpreter."""

import os

import pytest
import torch

from needlework.ops.runtime import launch_configs
from needlework.ops.runtime.launch_configs import widths
from needlework.ops.specs import specs
from needlework.testing.compare import EXACT, differentiate, leaves, like, make, relative

RULES = (
    "delta/gated",
    "delta/gla",
    "delta/kda",
    "delta/gdn2",
    "delta/previous",
    "delta/given",
    "delta/grouped",
    "qdelta",
    "qdelta/grouped",
    "mamba3",
    "ccq/aligned",
    "ccq/grouped",
    "carve",
    "carve/decayed",
    "carve/rank4",
    "polar",
    "polar/grouped",
    "polar/window",
)
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


def wide(monkeypatch):
    """Every call gets eight numbers a head more, once."""
    import needlework.ops.carve.feedback.op as carve
    import needlework.ops.ccq.curvature.op as ccq
    import needlework.ops.delta.inputs as delta
    import needlework.ops.lucid.solve.op as lucid
    import needlework.ops.mamba3.siso.op as mamba3
    import needlework.ops.polar.attention.op as polar

    more = lambda engine, device, dtype, K, V: (K, V) if K % 8 == 5 else (K // 8 * 8 + 13, V // 8 * 8 + 13)
    for module in (carve, ccq, delta, lucid, mamba3, polar):
        monkeypatch.setattr(module, "widths", more)


@interpreted
@pytest.mark.parametrize("ends", (None, [0, 9, 9, 30]))
@pytest.mark.parametrize("name", RULES)
def test_values_states_and_gradients_are_the_definitions(name, ends, monkeypatch):
    spec = next(spec for spec in specs() if spec.name == name)
    x, N = make(spec, 1, 30), 1 if ends is None else len(ends) - 1
    cu_seqlens = None if ends is None else torch.tensor(ends)
    start = spec.chunk(**make(spec, N, 11), impl="reference", output_final_state=True)[-1]
    x |= dict(leaves(start, "initial_state"))

    def found(impl):
        def call(x):
            state = like(start, iter([x[name] for name, _ in leaves(start, "initial_state")]))
            tokens = {name: y for name, y in x.items() if not name.startswith("initial_state")}
            return spec.chunk(**tokens, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, impl=impl)

        values, gradients = differentiate(call, x)
        return values | gradients

    exact = found("reference")
    wide(monkeypatch)
    padded = found("triton")
    assert padded.keys() == exact.keys()
    for name, want in exact.items():
        assert padded[name].shape == want.shape and relative(padded[name], want) <= EXACT, name


@interpreted
@pytest.mark.parametrize("ends", (None, [0, 9, 9, 30]))
@pytest.mark.parametrize("name", ("lucid", "lucid/rowmax", "lucid/beta", "lucid/window"))
def test_similarities_are_scaled_by_the_given_width(name, ends, monkeypatch):
    spec = next(spec for spec in specs() if spec.name == name)
    x, cu_seqlens = make(spec, 1, 30), None if ends is None else torch.tensor(ends)
    found = lambda impl: differentiate(lambda x: spec.chunk(**x, cu_seqlens=cu_seqlens, impl=impl).y, x)
    exact = found("reference")
    wide(monkeypatch)
    for padded, want in zip(found("triton"), exact, strict=True):
        assert all(padded[n].shape == want[n].shape and relative(padded[n], want[n]) <= EXACT for n in want)


@interpreted
def test_halves_that_are_turned_are_those_of_the_given_width(monkeypatch):
    spec = next(spec for spec in specs() if spec.name == "mamba3")
    x = make(spec, 1, 30)
    exact = spec.chunk(**x, pairs="halves", impl="reference").o
    wide(monkeypatch)
    assert relative(spec.chunk(**x, pairs="halves", impl="triton").o, exact) <= EXACT


@pytest.mark.parametrize(
    ("arch", "given", "wanted"),
    (
        ((9, 0), (68, 68), (72, 72)), ((9, 0), (128, 68), (128, 72)), ((9, 0), (64, 64), (64, 64)), ((9, 0), (255, 3), (256, 8)),
        ((8, 0), (68, 68), (68, 68)), ((9, 0), (300, 300), (300, 300)),
    ),
)  # fmt: skip
def test_rows_are_whole_where_a_config_wants_them(arch, given, wanted, monkeypatch):
    monkeypatch.setattr(launch_configs, "capability", lambda device: arch)
    monkeypatch.setattr(launch_configs, "shared_memory", lambda arch: 232448)
    assert widths("delta/scalar", torch.device("cuda"), torch.bfloat16, *given) == wanted
    assert widths("path/engine", torch.device("cuda"), torch.bfloat16, *given) == given
