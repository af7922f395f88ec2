"""Kernels in Triton's interpreter, in a quarter of the time and within their tensors."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def hastened():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from .interpreter import hastened

    with hastened():
        yield


@pytest.fixture(autouse=True)
def bounded():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from .bounds import within_tensors

    with within_tensors():
        yield


@pytest.fixture
def bfloat16_in_the_interpreter(monkeypatch):
    """Products of bfloat16 are its numbers', and what becomes bfloat16 is rounded: the interpreter has it as a uint16."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def numbers(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, d, *others):
        return dot(self, numbers(a), numbers(b), d, *others)

    def cast_impl(self, x, to):
        if to.scalar == tl.bfloat16 and x.dtype.scalar == tl.float32:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.bfloat16).view(torch.uint16)
            return TensorHandle(rounded.numpy(), to.scalar)
        return cast(self, x, to)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


@pytest.fixture
def chained(monkeypatch):
    """Products of float32 matrices as a GPU sums them: one chain of fused multiply-adds, from the accumulator on."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def dot(builder, a, b, d, precision, apart):
        if not a.data.dtype == d.data.dtype == np.float32:
            return plain(builder, a, b, d, precision, apart)
        x, y = a.data.astype(np.float64), b.data.astype(np.float64)
        total = np.zeros_like(d.data) if apart else d.data
        for i in range(x.shape[-1]):
            total = (total + x[..., :, i, None] * y[..., i, None, :]).astype(np.float32)
        return TensorHandle(total + d.data if apart else total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
