"""Polar's steps on a table of slots in Triton's interpreter, against torch's."""

import os

import pytest
import torch

from needlework.ops.polar import PolarState, step_polar
from needlework.ops.polar.spec import inputs as sample
from needlework.testing.compare import EXACT, relative

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


@pytest.mark.parametrize("window, rows", ((None, 9), (4, 4), (4, 6)))
def test_steps_are_torchs_steps_to_the_last_slot(window, rows, monkeypatch):
    """Slots out of order, a padded row, a ring that wraps, a table longer than its window."""
    slots = torch.tensor([2, -1, 0])
    generator = torch.Generator().manual_seed(2)
    tables = {}
    outputs = {}
    inputs = sample(generator, 3, 8, "random", Hq=4, Hkv=2)
    for impl in ("triton", "torch"):
        monkeypatch.setenv("NEEDLEWORK_IMPL", impl)
        page = lambda width: torch.zeros(4, rows, 2, width, dtype=torch.float64)
        tables[impl] = PolarState(page(16), page(24), torch.zeros(4, dtype=torch.int64))
        token = lambda t: {n: x[:, t] if n in ("q", "k", "v") else x for n, x in inputs.items()}
        outputs[impl] = [step_polar(**token(t), state=tables[impl], slots=slots, window=window) for t in range(8)]
    for got, want in zip(outputs["triton"], outputs["torch"], strict=True):
        assert all(relative(a, b) <= EXACT for a, b in zip(got, want, strict=True))
        assert not got[0][1].any()
    assert all(torch.equal(a, b) for a, b in zip(tables["triton"], tables["torch"], strict=True))


def test_a_full_table_is_refused_and_left_alone(monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    inputs = sample(torch.Generator().manual_seed(0), 1, 1, "random")
    state = PolarState(torch.zeros(1, 3, 2, 16).double(), torch.zeros(1, 3, 2, 24).double(), torch.tensor([3]))
    token = {n: x[:, 0] if n in ("q", "k", "v") else x for n, x in inputs.items()}
    with pytest.raises(ValueError, match=r"state\.k: axis 1 \(P\) has capacity 3.* length 3"):
        step_polar(**token, state=state)
    assert state.length.tolist() == [3] and not state.k.any()


def test_the_append_passes_opcheck():
    from needlework.ops.polar.step import polar_append

    k, v, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 24), torch.tensor([2, -1, 0])
    state = PolarState(torch.zeros(4, 5, 2, 16), torch.zeros(4, 5, 2, 24), torch.tensor([0, 1, 4, 7]))
    torch.library.opcheck(polar_append, (k, v, *state, slots, 4), test_utils=("test_schema", "test_faketensor"))
