"""An additive rule's operands stay within float16, whatever its keys, values and state are; powers of two change no bit of a result."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from needlework.ops.common.samples import normal, uniform
from needlework.ops.delta.inputs import DeltaInputs
from needlework.ops.delta.op import chunk_delta
from needlework.ops.delta.recurrent import recurrent_delta
from needlework.ops.delta.scaled import scaled
from needlework.ops.delta.scaling import of_states, shares
from needlework.testing.compare import assert_close, differentiate, relative
from needlework.testing.rows import covering

H, HV, K, V, SCALE = 1, 2, 16, 12, 0.3
PACKED = torch.tensor([0, 17, 17, 37])

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")


class PowersOfTwo(NamedTuple):
    """a, b and c of `scaling.py`, and rows scaled by them one after another."""

    q: Tensor  # [B 1 HR 1]
    k: Tensor  # [B 1 H 1]
    v: Tensor  # [B 1 HV 1]

    @classmethod
    @torch.no_grad()
    def of(cls, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, scale: float) -> "PowersOfTwo":
        """initial_state [N HV K V], or of each head its largest number [N HV 1 1]."""
        T, K = k.shape[1], k.shape[3]
        bounds = (torch.linalg.vector_norm(x, torch.inf, (1, 3), keepdim=True).float() for x in (q, k, v))
        a, b, c = (x * share for x, share in zip(bounds, shares(T, K, scale), strict=True))
        if initial_state is not None:
            c = torch.maximum(c, of_states(initial_state, len(c))[:, None, :, None])
        return cls(*map(_power_of_two, (a, b, c)))

    def divide(
        self, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q', k', v' and S₀'."""
        q, k, v = (x * power.reciprocal().to(x.dtype) for x, power in zip((q, k, v), self, strict=True))
        return q, k, v, None if initial_state is None else initial_state * self._state().reciprocal()

    def multiply(self, o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """o and S from o' and S'."""
        return self.outputs(o), state * self._state()

    def outputs(self, o: Tensor) -> Tensor:
        """o from o'."""
        HV = o.shape[2]
        return o * (_heads(self.q, HV) * _heads(self.k, HV) * self.v).to(o.dtype)

    def _state(self) -> Tensor:
        """bc [B HV 1 1]."""
        return (_heads(self.k, self.v.shape[2]) * self.v).transpose(1, 2)


def _heads(power: Tensor, HV: int) -> Tensor:
    return power.repeat_interleave(HV // power.shape[2], 2)


def _power_of_two(x: Tensor) -> Tensor:
    """The least at or above x and 1: the exponent of float32, one more where the mantissa is not 0."""
    return ((x.clamp(min=1).view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


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


@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["batch", "packed"])
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


@interpreted
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


def bfloat16_inputs(of="scalar", sizes=(30.0, 300.0, 300.0, 1e6), seed=0, B=2, N=None, state=True, gate=True):
    """In bfloat16; the second head's values are a sixteenth of the first one's, and its c likewise."""
    inputs = sample(sizes, B=B, N=N, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: x * normal(generator, *x.shape).to(x.dtype) for name, x in inputs.items()}
    inputs["v"] = inputs["v"] * torch.tensor([1.0, 1 / 16]).bfloat16()[:, None]
    g = inputs["g"].abs().neg()
    inputs["g"] = (g if of == "channel" else g[..., 0].contiguous()) if gate else None
    inputs["initial_state"] = inputs["initial_state"] if state else None
    return inputs


def kernels(gate, cu_seqlens):
    """Of the engine for a gate a head, or a channel."""
    from needlework.ops.delta.channel.op import channel
    from needlework.ops.delta.scalar.op import scalar

    if gate == "channel":
        return lambda inputs, _: channel(inputs, cu_seqlens, scale=SCALE, prediction="decayed")
    return lambda inputs, _: scalar(inputs, cu_seqlens, scale=SCALE)


def scaled_by_kernels(gate="scalar", cu_seqlens=None):
    engine = kernels(gate, cu_seqlens)
    return lambda inputs: scaled(engine, DeltaInputs(**inputs), None, cu_seqlens, SCALE, True)


def scaled_around_kernels(gate, cu_seqlens):
    engine = kernels(gate, cu_seqlens)

    def call(inputs):
        q, k, v, state = (inputs[n] for n in ("q", "k", "v", "initial_state"))
        powers = PowersOfTwo.of(q, k, v, state, SCALE)
        q, k, v, state = powers.divide(q, k, v, state)
        return powers.multiply(*engine(DeltaInputs(q, k, v, inputs["g"], initial_state=state), None))

    return call


def with_gradients(call, inputs, size=1e-3):
    """o and the final state, the gradients of what is given."""
    leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    results = call(leaves)
    generator = torch.Generator().manual_seed(7)
    cotangents = [size * normal(generator, *y.shape).to(y.dtype) for y in results]
    given = {name: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(results, list(given.values()), cotangents)
    return dict(zip(("o", "state", *given), (*(y.detach() for y in results), *gradients), strict=True))


@interpreted
@pytest.mark.parametrize("gate", ["scalar", "channel"])
@pytest.mark.parametrize(
    "seed, length, row",
    [
        (0, 0, {}),
        (1, 0, {"state": False, "gate": False}),
        (2, 0, {"B": 1, "N": 3}),
        (3, 1, {"B": 1}),
        (4, 1, {"B": 1, "N": 3}),
        (5, 0, {"sizes": (1e3, 2.0, 1e8, 1.0)}),
    ],
)
def test_kernels_that_scale_rows_give_the_bits_of_rows_scaled_around_them(
    seed, length, row, gate, monkeypatch, bfloat16_in_the_interpreter
):
    from needlework.ops.delta.channel import op as channel
    from needlework.ops.delta.scalar import op as scalar

    for op in (scalar, channel):
        monkeypatch.setattr(op, "segment_length", lambda *_, **settings: length)
    cu_seqlens = PACKED if "N" in row else None
    inputs = bfloat16_inputs(gate, seed=seed, **row)
    if inputs["g"] is None and gate == "channel":
        inputs["g"] = inputs["v"].new_zeros(*inputs["v"].shape[:3], K, dtype=torch.float32)
    expected = with_gradients(scaled_around_kernels(gate, cu_seqlens), inputs)
    found = with_gradients(scaled_by_kernels(gate, cu_seqlens), inputs)
    for name, x in expected.items():
        assert x.isfinite().all() and x.any()
        assert torch.equal(found[name], x), name


@interpreted
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_gradients_of_zero_are_zero_however_large_the_rows(gate, bfloat16_in_the_interpreter):
    found = with_gradients(scaled_by_kernels(gate), bfloat16_inputs(gate, (2e4, 2e4, 2e4, 1.0), B=1), size=0.0)
    assert not any(x.any() for name, x in found.items() if name not in ("o", "state"))


@interpreted
@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 4)])
def test_kernels_find_the_powers_of_the_page(heads, monkeypatch):
    from needlework.ops.delta import powers

    monkeypatch.setattr(powers, "TOKENS", 8)
    monkeypatch.setattr(powers, "BLOCK", 64)
    monkeypatch.setattr(powers, "AT_ONCE", 2)
    generator, B, T = torch.Generator().manual_seed(0), 2, 37
    rows = [normal(generator, B, T, n, D).bfloat16() for n, D in zip(heads, (K, K, V), strict=True)]
    for x in rows:
        # each head's largest number is somewhere else, the last head's at the end
        for b in range(B):
            for h in range(x.shape[2]):
                x[b, T - 1 - 11 * (x.shape[2] - 1 - h), h, -1] = -(2.0 ** (5 + 2 * h + b))
    largest = normal(generator, B, heads[2], 1, 1).float() * 2.0**24
    for states in (None, largest):
        expected = PowersOfTwo.of(*rows, states, SCALE)
        a, b, c = (x[:, 0, :, 0].repeat_interleave(heads[2] // x.shape[2], 1) for x in expected)
        arguments = (*rows, None if states is None else of_states(states, B), SCALE)
        found = powers.delta_powers(*arguments)
        assert torch.equal(found, torch.stack((a, b, c, b * c), 2))
    torch.library.opcheck(powers.delta_powers, arguments, test_utils=("test_schema", "test_faketensor"))
    rows[2][1, 20, 0, 3] = torch.nan
    assert powers.delta_powers(*rows, None, SCALE)[1, 0, 2] == torch.inf, "a NaN must arrive"


@interpreted
def test_the_compiler_takes_kernels_that_scale_rows_whole(bfloat16_in_the_interpreter):
    inputs, call = bfloat16_inputs(B=1), scaled_by_kernels()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = with_gradients(call, inputs)
    for name, x in with_gradients(compiled, inputs).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_a_gpu_keeps_bfloat16s_range(gate, monkeypatch):
    from needlework.ops.delta import op
    from needlework.ops.delta.scalar import forward

    monkeypatch.setattr(op, "_shares_keys", lambda _: False)  # the additive engine scales nothing
    monkeypatch.setattr(forward, "LEAST_PROGRAMS", 1)  # both value heads in one program
    inputs = sample((30.0, 300.0, 300.0, 1e6), T=2048, dtype=torch.bfloat16, device="cuda")
    inputs["g"] = inputs["g"][..., 0].contiguous() if gate == "scalar" else inputs["g"]
    call = lambda impl: lambda x: tuple(chunk_delta(**x, output_final_state=True, impl=impl))
    values, gradients = differentiate(call("triton"), inputs)
    expected, right = differentiate(call("torch"), {name: x.double() for name, x in inputs.items()})
    for name, x in (values | gradients).items():
        assert relative(x, (expected | right)[name]) < 1e-2, name
