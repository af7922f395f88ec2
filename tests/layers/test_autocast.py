"""Under bfloat16 autocast projections run in half, and what an op's contract computes in float32 stays in float32."""

import pytest
import torch

from needlework.layers.catalog import CATALOG, Sizes
from needlework.layers.conv import CausalConv
from needlework.ops.specs import specs
from needlework.probe import listen
from needlework.testing.compare import differentiate, make, whole

DIM = 32
SIZES = Sizes(heads=2, key_dim=8, value_dim=16, attention_heads=4, kv_heads=2, head_dim=8, content_chunk=8)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("name", CATALOG)  # every write, read and attend rule is in it
def test_a_mixer_in_float32_runs_forward_and_backward_under_autocast(name):
    torch.manual_seed(0)
    mixer, x = CATALOG[name].make(SIZES).build(DIM), torch.randn(2, 37, DIM, requires_grad=True)
    with autocast():
        y, _ = mixer(x)
        loss = y.float().square().mean()
    loss.backward()
    for what, tensor in {"y": y, "dx": x.grad, **{n: p.grad for n, p in mixer.named_parameters()}}.items():
        assert torch.isfinite(tensor).all(), what


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_an_op_under_autocast_is_bit_equal_to_the_op_without(spec):
    inputs, call = {name: x.float() for name, x in make(spec, 2, 83).items()}, whole(spec.chunk)

    def under_autocast(inputs):
        with autocast():
            return call(inputs)

    for part, same in zip(differentiate(call, inputs), differentiate(under_autocast, inputs), strict=True):
        for name, x in part.items():
            assert x.dtype == same[name].dtype and torch.equal(x, same[name]), name


@pytest.mark.parametrize("name", CATALOG)
def test_what_an_op_reads_and_what_it_gives_are_in_half(name):
    """In float32 every kernel would be another, many times slower."""
    heard = {}

    def note(name, x):
        if name in (
            "recurrent.o",
            "qdelta.q",
            "carve.k",
            "carve.f",
            "carve.b",
            "ccq.k",
            "lucid.k",
            "lucid_path.k",
            "polar.q",
            "polar.k",
            "mamba3.o",
        ):
            heard[name] = x.dtype

    mixer = CATALOG[name].make(SIZES).build(DIM)
    convolved = [m for m in mixer.modules() if isinstance(m, CausalConv)]
    for module in convolved:
        module.register_forward_hook(lambda module, inputs, out: heard.update(conv=out[0][0].dtype))
    with autocast(), listen(note):
        mixer(torch.randn(2, 37, DIM))
    assert heard and set(heard.values()) == {torch.bfloat16}, heard
