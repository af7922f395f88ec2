"""Calls of documents whose tables are kept with cu_seqlens, as a GPU's are, in Triton's interpreter."""

import os

import pytest
import torch

from needlework.ops.specs import specs
from needlework.testing.compare import differentiate, make
from tests.ops.test_remembered import counted, lasting  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


@pytest.mark.parametrize("name", ("delta/gated", "delta/kda", "qdelta", "ccq", "lucid", "polar", "path", "mamba3"))
def test_calls_give_the_same_bits_and_read_nothing_again(name, lasting):  # noqa: F811
    """Forward and backward, of documents that change in place too."""
    spec = next(spec for spec in specs() if spec.name == name)
    x = make(spec, 1, 30)
    found = lambda ends: differentiate(lambda x: spec.chunk(**x, cu_seqlens=ends, impl="triton"), x)
    first, second = torch.tensor([0, 4, 4, 30]), torch.tensor([0, 17, 21, 30])
    want = [found(first.clone()), found(second.clone())]
    ends = first.clone()
    found(ends)
    with pytest.MonkeyPatch.context() as patch:
        reads = counted(patch)
        again = found(ends)
    assert not any(read is ends for read in reads)
    ends.copy_(second)
    changed = found(ends)
    for got, expected in zip((again, changed), want, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
