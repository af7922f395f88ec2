"""What is timed: our calls at the shapes of the papers' models, the peers' calls for the same mathematics, and the floors.

q and k have unit norm before the call on both sides, decays are float32, neither side is asked for its final state, and
`peer_inputs` is not timed. A case without its peer installed is timed alone.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import peers
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from needlework.ops.api import OpSpec
from needlework.ops.delta import chunk_delta
from needlework.ops.specs import specs

SHAPES = {
    "A": {"B": 8, "T": 4096, "H": 6, "K": 256, "V": 512},
    "B": {"B": 8, "T": 4096, "H": 16, "K": 128, "V": 128},
    "C": {"B": 1, "T": 32768, "H": 16, "K": 128, "V": 128},
    "K256": {"B": 8, "T": 4096, "H": 6, "K": 256, "V": 256},
    "64-heads": {"B": 4, "T": 4096, "H": 64, "K": 128, "V": 64},
    # attention: H key-value heads
    "kv4-8K": {"B": 4, "T": 8192, "H": 4, "K": 64, "V": 64},
    "kv32-8K": {"B": 4, "T": 8192, "H": 32, "K": 64, "V": 64},
    "kv4-32K": {"B": 1, "T": 32768, "H": 4, "K": 64, "V": 64},
    "kv4-d128": {"B": 4, "T": 8192, "H": 4, "K": 128, "V": 128},
    "2K": {"B": 16, "T": 2048, "H": 2, "K": 128, "V": 128},
    "16K": {"B": 2, "T": 16384, "H": 2, "K": 128, "V": 128},
    "64K": {"B": 1, "T": 65536, "H": 2, "K": 128, "V": 128},
    "kv8-4K": {"B": 4, "T": 4096, "H": 8, "K": 64, "V": 64},
    "kv8-16K": {"B": 1, "T": 16384, "H": 8, "K": 64, "V": 64},
    "kv8-4K-d128": {"B": 4, "T": 4096, "H": 8, "K": 128, "V": 128},
    "kv8-16K-d128": {"B": 1, "T": 16384, "H": 8, "K": 128, "V": 128},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape. bars: pass -> the ratio to the peer that is promised; share: what part of the run's matrix product rate the
    forward pass is to reach. flops, numbers: for a token and head forward,
    multiply-adds × 2, and what must move once, counted in numbers of 2 bytes."""

    op: str
    at: str
    spec: OpSpec
    inputs: Callable[..., dict[str, Tensor]]
    peer: peers.Peer | None
    peer_inputs: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    bars: dict[str, float] = field(default_factory=dict)
    share: float | None = None
    flops: float = 0.0
    numbers: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.op}/{self.at}"

    @property
    def shape(self) -> dict[str, int]:
        return SHAPES[self.at]

    def tensors(self, device: torch.device | str, dtype: torch.dtype, B: int, T: int, seed: int = 0) -> dict[str, Tensor]:
        """Inputs as they are stored: q, k, v and what a projection's σ gives in `dtype`, decays and parameters float32."""
        generator = torch.Generator(device=device).manual_seed(seed)
        H, K, V = (self.shape[axis] for axis in "HKV")
        made = self.inputs(generator, B, T, H, K, V)
        half = {*self.spec.half, *({"beta", "lam", "eta"} & {*self.spec.tokens})}
        return {name: x.to(dtype if name in half else torch.float32) for name, x in made.items()}

    def ours(self, **x: Tensor) -> Tensor:
        return self.spec.chunk(**x)[0]

    def floor(self, passes: str, bandwidth: float, rate: float) -> float:
        """Milliseconds that no implementation undercuts: bytes over bandwidth or operations over the matrix rate, the larger.

        Backward does twice forward's products, reads the operands and the output's gradient and writes the operands'
        gradients: forward and backward move three times forward's bytes in all.
        """
        rows = self.shape["B"] * self.shape["T"] * self.shape["H"]
        times = 1 if passes == "fwd" else 3
        return 1e3 * rows * times * max(2 * self.numbers / bandwidth, self.flops / rate)


def inputs(
    generator: torch.Generator, B: int, T: int, H: int, K: int, V: int, *,
    HV: int | None = None, gate: str | None = "scalar", extra=(), values=True,
) -> dict[str, Tensor]:  # fmt: skip
    """Unit q and k, normal v, Gated DeltaNet's own gate at initialisation; float64 on the generator's device. HV: value heads, H by
    default."""
    normal, uniform = draws(generator)
    unit = partial(normalize, dim=-1)
    HV = H if HV is None else HV
    x = {"q": unit(normal(B, T, H, K)), "k": unit(normal(B, T, H, K))}
    if values:
        x["v"] = normal(B, T, HV, V)
    if gate is not None:
        rate, step = 16 * uniform(1, 1, HV), (1e-3 * 100 ** uniform(1, 1, HV))
        wide = (B, T, HV) if gate == "scalar" else (B, T, HV, K)
        x["g"] = -(rate * step).view(1, 1, HV, *[1] * (len(wide) - 3)) * (0.3 * normal(*wide)).exp()
    return x | {name: torch.sigmoid(normal(B, T, HV) - (0 if name == "beta" else 0.9)) for name in extra}


def carve_inputs(generator: torch.Generator, B: int, T: int, H: int, K: int, V: int, rank: int = 32) -> dict[str, Tensor]:
    """CARVE as its layer starts it, half-lives of 32 to 8,192 tokens, but with content: W₂ is not zero."""
    normal, _ = draws(generator)
    quantile = (torch.arange(K, device=generator.device, dtype=torch.float64) + 0.5) / K
    forgotten = math.log(2) / (32 * (8192 / 32) ** quantile)
    start = torch.log(torch.expm1(forgotten)).expand(H, K)  # the decay's softplus and the erase gate's σ both start there
    x = inputs(generator, B, T, H, K, V, gate=None)
    x |= {"f": 0.3 * normal(B, T, H, K), "b": 0.3 * normal(B, T, H, K), "w": normal(B, T, H)}
    x |= {"A_log": 0.1 * normal(H, K), "dt_bias": start + 0.1 * normal(H, K), "b_bias": start.clone()}
    return x | {"w1": normal(rank, V) * V**-0.5, "w2": normal(K, rank) * rank**-0.5}


def mamba3_inputs(generator: torch.Generator, B: int, T: int, H: int, K: int, V: int, *, groups: int = 1) -> dict[str, Tensor]:
    """Mamba-3 as its layer starts it, its H heads in so many groups: C and B of norm √K, their biases 1, Δ from 1e-3 to 1e-1 and A = −ln 2;
    half of the pairs turn."""
    normal, uniform = draws(generator)
    dt = 1e-3 * 100 ** uniform(1, 1, H) * (0.3 * normal(B, T, H)).exp()
    one = torch.ones(H, K, dtype=torch.float64, device=generator.device)
    x = {"q": normal(B, T, groups, K), "k": normal(B, T, groups, K), "v": normal(B, T, H, V)}
    x |= {"g": -math.log(2) * dt, "dt": dt}
    return x | {
        "lam": torch.sigmoid(normal(B, T, H)),
        "angle": normal(B, T, max(K // 4, 1)),
        "q_bias": one,
        "k_bias": one.clone(),
    }


def one_key(generator: torch.Generator, B: int, T: int, H: int, K: int, V: int) -> dict[str, Tensor]:
    """Mamba-2's: one query and one key for all of its H value heads."""
    return inputs(generator, B, T, 1, K, V, HV=H)


def expanded(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """A query and a key for each value head, which the peer wants."""
    H = x["v"].shape[2]
    return x | {name: x[name].expand(-1, -1, H, -1).contiguous() for name in "qk"}


def with_heads(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the additive rule reads at Mamba-3's sizes: a query and a key for each head."""
    groups = lambda y: y.repeat_interleave(x["v"].shape[2] // y.shape[2], 2)
    return {name: (groups(x[name]) + x[f"{name}_bias"]).to(x[name]) for name in "qk"} | {"v": x["v"], "g": x["g"]}


def draws(generator: torch.Generator) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    options = {"generator": generator, "device": generator.device, "dtype": torch.float64}
    return partial(torch.randn, **options), partial(torch.rand, **options)


def without_content(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """KDA's arguments that CARVE's are without its content: the peer has none."""
    l = -x["A_log"].exp() * softplus(x["f"] + x["dt_bias"]) + logsigmoid(-x["b"] - x["b_bias"])
    return {name: x[name] for name in "qkv"} | {"g": l, "beta": torch.sigmoid(x["w"]).to(x["q"])}


def only(*names: str) -> Callable[[dict], dict]:
    return lambda x: {name: x[name] for name in names}


def spec_of(name: str, **settings: object) -> OpSpec:
    """The battery's spec with other settings, its chunk form the kernels."""
    spec = next(spec for spec in specs() if spec.name == name)
    forms = {form: partial(getattr(spec, form), **settings) for form in ("recurrent", "literal")}
    return dataclasses.replace(spec, chunk=partial(spec.chunk, **settings, impl="triton"), **forms)


def _read_by(clean: Callable, write: Callable) -> Callable[..., tuple]:
    """CCQ on Gated DeltaNet: the cleaned query reads."""

    def layer(q, k, v, g, beta, eta, output_final_state=False, **settings) -> tuple:
        return write(q=clean(q=q, k=k, eta=eta, **settings).q, k=k, v=v, g=g, beta=beta,
                     output_final_state=output_final_state, **settings)  # fmt: skip

    return layer


def cleaned_gated() -> OpSpec:
    gated, ccq = spec_of("delta/gated"), spec_of("ccq")
    forms = {form: _read_by(getattr(ccq, form), getattr(gated, form)) for form in ("chunk", "recurrent", "literal")}
    return dataclasses.replace(gated, **forms)


def _scalar(op: str, at: str, bars: dict[str, float], C: int = 32) -> Case:
    K, V = SHAPES[at]["K"], SHAPES[at]["V"]
    qdelta = op == "qdelta"
    comba = qdelta and at == "A"
    return Case(
        op=op,
        at=at,
        spec=spec_of("qdelta" if qdelta else "delta/gated"),
        inputs=partial(inputs, extra=("beta", "lam") if qdelta else ("beta",)),
        peer=peers.COMBA if comba else peers.GATED,
        peer_inputs=dict if comba else only("q", "k", "v", "g", "beta"),
        bars=bars,
        flops=6 * K * V + 4 * C * (K + V),
        numbers=2 * K + 2 * V,
    )


def _channel(op: str, prediction: str) -> Case:
    K, V = SHAPES["B"]["K"], SHAPES["B"]["V"]
    return Case(
        op=op,
        at="B",
        spec=spec_of("delta/kda" if prediction == "decayed" else "delta/previous"),
        inputs=partial(inputs, gate="channel", extra=("beta",)),
        peer=peers.KDA,
        bars={"fwd": 0.45, "fwd+bwd": 0.45},
        flops=6 * K * V + 4 * 16 * (K + V),
        numbers=4 * K + 2 * V,  # g is float32
    )


def _carve() -> Case:
    K, V = SHAPES["B"]["K"], SHAPES["B"]["V"]
    return Case(
        op="carve",
        at="B",
        spec=spec_of("carve", content_chunk=128),
        inputs=carve_inputs,
        peer=peers.KDA,
        peer_inputs=without_content,
        bars={"fwd": 0.6, "fwd+bwd": 0.45},
        flops=6 * K * V + 4 * 16 * (K + V),
        numbers=4 * K + 2 * V,
    )


def _ccq() -> Case:
    K = SHAPES["K256"]["K"]
    return Case(
        op="ccq",
        at="K256",
        spec=spec_of("ccq"),
        inputs=partial(inputs, gate=None, extra=("eta",), values=False),
        peer=peers.CURVATURE,
        bars={"fwd+bwd": 0.4},
        flops=4 * K * K + 4 * 32 * K,
        numbers=3 * K,
    )


def _cleaned_gated() -> Case:
    gated, ccq = _scalar("gated", "A", {}), _ccq()
    return Case(
        op="ccq+gated",
        at="A",
        spec=cleaned_gated(),
        inputs=partial(inputs, extra=("beta", "eta")),
        peer=peers.Peer("needlework chunk_delta", lambda: gated.ours, ours=True),
        peer_inputs=only("q", "k", "v", "g", "beta"),
        bars={"fwd+bwd": 1.25},
        flops=gated.flops + ccq.flops,
        numbers=gated.numbers,
    )


def _mamba2() -> Case:
    K, V = SHAPES["64-heads"]["K"], SHAPES["64-heads"]["V"]
    return Case(
        op="mamba2",
        at="64-heads",
        spec=spec_of("delta/gla"),
        inputs=one_key,
        peer=peers.SIMPLE_GLA,
        peer_inputs=expanded,
        bars={"fwd": 0.6, "fwd+bwd": 0.6},
        flops=4 * K * V + 2 * 64 * (K + V),
        numbers=2 * V,  # a query and a key serve all heads
    )


def _mamba3() -> Case:
    K, V = SHAPES["64-heads"]["K"], SHAPES["64-heads"]["V"]
    additive = lambda **x: chunk_delta(**x, scale=1.0, impl="triton").o
    return Case(
        op="mamba3",
        at="64-heads",
        spec=spec_of("mamba3"),
        inputs=mamba3_inputs,
        peer=peers.Peer("needlework chunk_delta, additive", lambda: additive, ours=True),
        peer_inputs=with_heads,
        bars={"fwd": 1.15, "fwd+bwd": 1.15},
        flops=4 * K * V + 2 * 64 * (K + V),
        numbers=2 * V,  # queries and keys are one for all heads
    )


CASES = (
    _scalar("gated", "A", {"fwd": 0.5, "fwd+bwd": 0.55}),
    _scalar("qdelta", "A", {"fwd": 0.5, "fwd+bwd": 0.55}),
    _scalar("gated", "B", {"fwd": 0.5, "fwd+bwd": 0.65}),
    _scalar("qdelta", "B", {"fwd": 0.5, "fwd+bwd": 0.65}),
    _scalar("gated", "C", {"fwd": 0.5, "fwd+bwd": 0.6}),
    _scalar("qdelta", "C", {"fwd": 0.5, "fwd+bwd": 0.6}),
    _channel("kda", "decayed"),
    _channel("carve-gates-given", "previous"),
    _carve(),
    _ccq(),
    _cleaned_gated(),
    _mamba2(),
    _mamba3(),
)
