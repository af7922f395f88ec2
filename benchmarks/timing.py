"""Medians, peak memory and cold first calls on one GPU. Knows no op."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def median(call: Callable[[], object], warmup: int = 25, rep: int = 100) -> float:
    """Milliseconds, the L2 cache flushed between calls."""
    from triton.testing import do_bench

    return do_bench(call, warmup=warmup, rep=rep, return_mode="median")


def peak(call: Callable[[], object]) -> float:
    """MiB that the call holds at most, above what was held before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def passes(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The forward pass without gradients, and forward with backward for every tensor, under one random cotangent."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    with torch.no_grad():
        shape = function(**tensors)
    cotangent = torch.randn_like(shape)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(**tensors)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(**leaves), list(leaves.values()), cotangent)

    return {"fwd": forward, "fwd+bwd": both}


def replay(call: Callable[[], object]) -> Callable[[], object]:
    """`call` captured in a CUDA graph: what it costs the GPU, not the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ceilings() -> tuple[float, float]:
    """Bytes a second of a large device copy (read and written), and operations a second of a bf16 matrix product."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    bandwidth = 2 * x.numel() * x.element_size() / (median(lambda: y.copy_(x)) * 1e-3)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return bandwidth, 2 * 8192**3 / (median(lambda: a @ b) * 1e-3)


def cold(script: Path, *arguments: str) -> float:
    """Milliseconds that `script` prints on its last line, run in a new process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{run.stderr[-4000:]}")
    return float(run.stdout.strip().splitlines()[-1])
