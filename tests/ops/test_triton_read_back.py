"""What a layer says that a CUDA graph may hold of serving reads nothing back to the host. A graph would hold the first value for ever."""

import traceback
from itertools import product
from pathlib import Path

import pytest
import torch

import needlework
from needlework.layers.batch import Batch, Pages
from tests.layers.test_mixers import CONFIGS, DIM

HOME = str(Path(needlework.__file__).parent)
READS = ("tolist", "item", "nonzero", "__int__", "__bool__", "__float__", "__index__")
QUICK = ("qdelta-ccq", "atma rope with memory", "lucid", "mamba3", "mamba3 mimo", "path", "lucid path")
CALLS = {"all": ("steps", "prompts"), "steps": ("steps",), "none": ()}


@pytest.fixture
def read(monkeypatch):
    """The lines of needlework that read a tensor's values."""
    lines = set()

    def watched(method, x, *given, **options):
        caller = traceback.extract_stack(limit=3)[0]
        if caller.filename.startswith(HOME):
            lines.add(f"{caller.filename.removeprefix(HOME)}:{caller.lineno}")
        return method(x, *given, **options)

    for name in READS:
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, *given, of=method, **options: watched(of, x, *given, **options))
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    return lines


def steps(window, grows):
    """Two rows that decode."""
    pages = {window: Pages(torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([3, 35]))} if grows else {}
    return Batch(
        decodes=2, slots=torch.arange(2), fresh=torch.zeros(2, dtype=torch.bool), cu_seqlens=torch.zeros(1, dtype=torch.int64),
        length=torch.full((2,), 4, dtype=torch.int32), positions=torch.full((2,), 3), pages=pages,
    )  # fmt: skip


def prompts(window, grows):
    """Twenty tokens of one sequence and four of padding."""
    rows = torch.cat([torch.arange(20), torch.full((4,), -1)])
    pages = {window: Pages(torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32), rows)} if grows else {}
    return Batch(
        decodes=0, slots=torch.tensor([0, -1]), fresh=torch.tensor([True, False]), cu_seqlens=torch.tensor([0, 20, 24]),
        length=torch.tensor([20, -1], dtype=torch.int32), positions=torch.cat([torch.arange(20), torch.arange(-5, -1)]), pages=pages,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, call",
    [
        pytest.param(name, call, marks=() if name in QUICK else pytest.mark.slow, id=f"{name}, {call.__name__}")
        for name, call in product(CONFIGS, (steps, prompts))
    ],
)
def test_a_layer_reads_values_back_where_it_says_so_and_nowhere_else(name, call, read):
    torch.manual_seed(0)
    mixer = CONFIGS[name].build(DIM).eval()
    held = mixer.held(torch.float32)
    tables = {part: torch.zeros(4, *one.shape, dtype=one.dtype) for part, one in held.fixed.items()}
    tables |= {part: torch.zeros(8, 16, *one.shape, dtype=one.dtype) for part, one in held.rows.items()}
    batch = call(held.window, bool(held.rows))
    with torch.no_grad():
        mixer.serve(torch.randn(len(batch.positions), DIM), tables, batch)
    assert bool(read) == (call.__name__ not in CALLS[held.captured]), sorted(read)
