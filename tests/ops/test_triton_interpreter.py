"""Triton's interpreter in a quarter of the time gives the same numbers, bit for bit."""

import os

import pytest
import torch

from needlework.ops.specs import specs
from needlework.testing.compare import differentiate, make, whole
from needlework.testing.rows import chosen

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


@pytest.fixture(autouse=True)
def hastened():
    """Not here."""


@pytest.mark.parametrize("dtype", chosen([torch.float64, torch.bfloat16], quick=[torch.float64]))
@pytest.mark.parametrize("name", ["qdelta", "lucid", "polar"])
def test_hastened_it_is_the_same(name, dtype):
    from .interpreter import hastened

    spec = next(spec for spec in specs() if spec.name == name)
    inputs = {
        n: x.to(dtype if n in spec.half else torch.promote_types(dtype, torch.float32)) for n, x in make(spec, 1, 20).items()
    }
    call = lambda: differentiate(whole(spec.chunk, impl="triton"), inputs)
    plain = call()
    with hastened():
        fast = call()
    again = call()  # and it leaves nothing behind
    for x, *others in zip(plain, fast, again, strict=True):
        assert all(torch.equal(x[n], y[n]) for y in others for n in x)
