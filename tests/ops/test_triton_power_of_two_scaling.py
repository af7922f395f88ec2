"""An additive rule's operands stay within float16, whatever its keys, values and state are; powers of two change no bit of a result."""

import os

import pytest
import torch

from needlework.ops.common.samples import normal, uniform
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.op import chunk_delta
from needlework.ops.delta.recurrent import recurrent_delta
from needlework.ops.delta.scaling import PowersOfTwo, _power_of_two
from needlework.testing.compare import assert_close, differentiate, relative
from needlework.testing.rows import covering

H, HV, K, V, SCALE = 1, 2, 16, 12, 0.3


def sample(sizes, B=1, T=37, N=None, dtype=torch.float64, device="cpu"):
    """q, k, v and a state of these sizes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, state = sizes
    inputs = {
        "q": q * normal(generator, B, T, H, K),
        "k": k * normal(generator, B, T, H, K),
        "v": v * normal(generator, B, T, HV, V),
        "g": -uniform(generator, 1e-4, 0.02, B, T, HV, K),
        "initial_state": state * normal(generator, N or B, HV, K, V),
    }
    return {
        n: x.to(device, dtype if n in ("q", "k", "v") else torch.promote_types(dtype, torch.float32)) for n, x in inputs.items()
    }


def within(call):
    """call, on scaled arguments."""

    def run(inputs):
        q, k, v, state = (inputs[n] for n in ("q", "k", "v", "initial_state"))
        powers = PowersOfTwo.of(q, k, v, state, SCALE)
        q, k, v, state = powers.divide(q, k, v, state)
        return powers.multiply(*call({"q": q, "k": k, "v": v, "g": inputs["g"], "initial_state": state}))

    return run


def definition(cu_seqlens=None):
    return lambda inputs: tuple(recurrent_delta(**inputs, scale=SCALE, cu_seqlens=cu_seqlens, output_final_state=True))


def test_a_power_of_two_is_the_least_at_or_above():
    x = torch.tensor([0.0, 1.0, 1.0001, 2.0, 3.0, 4.0, 4.1, 65536.0, 65537.0])
    assert _power_of_two(x).tolist() == [1, 1, 2, 2, 4, 4, 8, 65536, 131072]


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 17, 17, 37])], ids=["batch", "packed"])
def test_the_result_and_every_gradient_stay(cu_seqlens):
    inputs = sample((1e3, 3e2, 5e3, 1e7), B=2 if cu_seqlens is None else 1, N=None if cu_seqlens is None else 3)
    (values, gradients), (expected, right) = (
        differentiate(call, inputs) for call in (within(definition(cu_seqlens)), definition(cu_seqlens))
    )
    assert_close(values, expected, "values")
    assert_close(gradients, right, "gradients")


@pytest.mark.parametrize("T, scale", covering([5, 4096, 1 << 16], [1.0, -1.0, 0.0], pairs=False))
def test_no_operand_passes_what_float16_holds(T, scale):
    """The worst there is: every number as large as any, of one sign, and nothing forgotten."""
    q, k, v, state = (torch.full((1, 1, 1, 1), x) for x in (5e4, 3e3, 7e5, 1e12))
    keys, values = 256, 512
    expand = lambda x, D: x.expand(1, T, 1, D)
    powers = PowersOfTwo.of(expand(q, keys), expand(k, keys), expand(v, values), state, scale)
    q, k, v, state = (float(x) for x in powers.divide(q, k, v, state))
    found = {
        "S": state + T * k * v,
        "coupling": abs(scale) * keys * q * k,
        "dS": abs(scale) * T * q,
        "do · v": values * v,
        "q": q,
    }
    assert all(x <= 2**15 for x in found.values()), found


def test_what_is_small_is_left_alone():
    inputs = sample((1.0, 1.0, 1.0, 1.0))
    powers = PowersOfTwo.of(*(inputs[n] for n in ("q", "k", "v", "initial_state")), SCALE)
    assert all(bool((power == 1).all()) for power in powers)


def test_the_compiler_takes_it_whole():
    call = lambda q, k, v: PowersOfTwo.of(q, k, v, None, SCALE).divide(q, k, v, None)[:3]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (37, 2048):
        q, k, v = (torch.randn(1, T, 1, K) * 40 for _ in range(3))
        for ours, theirs in zip(compiled(q, k, v), call(q, k, v), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
@pytest.mark.parametrize("engine", ["scalar", "channel"])
def test_kernels_alone_pass_it_and_with_scaling_are_right(engine):
    from needlework.ops.delta.channel.op import channel
    from needlework.ops.delta.scalar.op import scalar

    def call(inputs):
        if engine == "channel":
            return channel(DeltaInputs(**inputs), None, scale=SCALE, prediction="decayed")
        return scalar(DeltaInputs(**inputs), None, scale=SCALE)

    inputs = sample((1e-2, 300.0, 300.0, 1.0), dtype=torch.float16)
    if engine == "scalar":
        inputs["g"] = inputs["g"][..., 0].contiguous()
    wide = {name: x.double() for name, x in inputs.items()}
    assert not call(inputs)[0].isfinite().all()
    # S is about 1e6: cotangents so small that float16 holds every gradient
    weighed = lambda call: lambda x: tuple(1e-2**n * y for n, y in enumerate(call(x), 1))
    (values, gradients), (expected, right) = (
        differentiate(weighed(within(call)), inputs),
        differentiate(weighed(definition()), wide),
    )
    for name, x in (values | gradients).items():
        assert relative(x, (expected | right)[name]) < 2**-9, f"{name}: more than four roundings of float16"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_a_gpu_keeps_bfloat16s_range(gate):
    inputs = sample((30.0, 300.0, 300.0, 1e6), T=2048, dtype=torch.bfloat16, device="cuda")
    inputs["g"] = inputs["g"][..., 0].contiguous() if gate == "scalar" else inputs["g"]
    call = lambda impl: lambda x: tuple(chunk_delta(**x, output_final_state=True, impl=impl))
    values, gradients = differentiate(call("triton"), inputs)
    expected, right = differentiate(call("torch"), {name: x.double() for name, x in inputs.items()})
    for name, x in (values | gradients).items():
        assert relative(x, (expected | right)[name]) < 1e-2, name
