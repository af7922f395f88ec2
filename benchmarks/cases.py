"""What is timed: shapes of the papers' models, our call, the peer's call for the same mathematics, and the floor.

Peers come from flash-linear-attention where it is installed; a case without a peer there is timed alone. q and k have unit
norm before the call on both sides, gates are float32, and neither side is asked for the final state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from needlework.ops.ccq import chunk_ccq, recurrent_ccq
from needlework.ops.delta import chunk_delta, recurrent_delta
from needlework.ops.qdelta import chunk_qdelta, recurrent_qdelta


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape. bars: pass -> the ratio to the peer that is promised. flops, numbers: a token and value head's
    multiply-adds × 2 and the numbers that must move once, forward; backward counts as the text of `floor` says."""

    op: str
    shape: dict[str, int]
    ours: Callable[..., tuple]
    definition: Callable[..., tuple]
    inputs: Callable[..., dict[str, Tensor]]
    peer: str | None
    peer_call: Callable[[], Callable[..., Tensor]] | None = None
    bars: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    numbers: float = 0.0

    def floor(self, passes: str, bandwidth: float, rate: float) -> float:
        """Milliseconds that no implementation undercuts: bytes over bandwidth or operations over the matrix rate, the larger.

        Forward reads and writes every operand once in 2 bytes; backward does twice forward's products, reads the operands
        and the output's gradient and writes the operands' gradients: three times forward's bytes in all.
        """
        rows = self.shape["B"] * self.shape["T"] * self.shape["H"]
        times = 1 if passes == "fwd" else 3
        return 1e3 * rows * times * max(2 * self.numbers / bandwidth, self.flops / rate)


def inputs(
    generator: torch.Generator,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    gate: str | None = "scalar",
    extra: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Unit q and k, normal v, Gated DeltaNet's own gate at initialisation; float64 on the generator's device."""
    options = {"generator": generator, "device": generator.device, "dtype": torch.float64}
    normal = partial(torch.randn, **options)
    uniform = partial(torch.rand, **options)
    unit = partial(torch.nn.functional.normalize, dim=-1)
    x = {"q": unit(normal(B, T, H, K)), "k": unit(normal(B, T, H, K))}
    if "v" not in extra:
        x["v"] = normal(B, T, H, V)
    if gate is not None:
        rate, step = 16 * uniform(1, 1, H), (1e-3 * 100 ** uniform(1, 1, H))
        wide = (B, T, H) if gate == "scalar" else (B, T, H, K)
        x["g"] = -(rate * step).view(1, 1, H, *[1] * (len(wide) - 3)) * (0.3 * normal(*wide)).exp()
    for name in extra:
        if name in ("beta", "lam", "eta"):
            x[name] = torch.sigmoid(normal(B, T, H) - (0.9 if name == "lam" else 0))
    return x


def _fla(path: str) -> Callable:
    module, name = path.rsplit(".", 1)
    from importlib import import_module

    # its guard refuses this backward on Hopper under Triton 3.4-3.7.0; at K = 128 and 256 the miscompiled tile is not used
    import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return getattr(import_module(module), name)


def gated_delta_peer() -> Callable[..., Tensor]:
    call = _fla("fla.ops.gated_delta_rule.chunk_gated_delta_rule")
    return lambda q, k, v, g, beta: call(q, k, v, g, beta)[0]


def comba_peer() -> Callable[..., Tensor]:
    """Q-Delta is its comba with p = e^g (k + λq); p is formed outside, as a user of it must."""
    call = _fla("fla.ops.comba.chunk_comba")
    form = lambda q, k, g, lam: (g.exp()[..., None] * (k + lam[..., None] * q)).to(k.dtype)
    return lambda q, k, v, g, beta, lam: call(q, k, v, form(q, k, g, lam), g, beta)[0]


def kda_peer() -> Callable[..., Tensor]:
    call = _fla("fla.ops.kda.chunk_kda")
    return lambda q, k, v, g, beta: call(q, k, v, g, beta)[0]


def curvature_peer() -> Callable[..., Tensor]:
    """Σq by its linear attention with v = k, and the rest of the formula in PyTorch."""
    call = _fla("fla.ops.linear_attn.chunk_linear_attn")

    def cleaned(q: Tensor, k: Tensor, eta: Tensor) -> Tensor:
        t = torch.arange(1, q.shape[1] + 1, device=q.device)[:, None, None]
        mean = k.float().cumsum(1) / t
        Mq = call(q, k, k, scale=1.0, normalize=False)
        Mq = Mq[0] if isinstance(Mq, tuple) else Mq
        Sq = Mq.float() / t - mean * (mean * q.float()).sum(-1, keepdim=True)
        return (q.float() - eta[..., None] * Sq).to(q.dtype)

    return cleaned


def _delta(op: str, B: int, T: int, H: int, K: int, V: int, bars: dict[str, float], C: int = 32) -> Case:
    qdelta = op == "qdelta"
    return Case(
        op=op,
        shape={"B": B, "T": T, "H": H, "K": K, "V": V},
        ours=chunk_qdelta if qdelta else chunk_delta,
        definition=recurrent_qdelta if qdelta else recurrent_delta,
        inputs=partial(inputs, extra=("beta", "lam") if qdelta else ("beta",)),
        peer="flash-linear-attention chunk_comba" if qdelta else "flash-linear-attention chunk_gated_delta_rule",
        peer_call=comba_peer if qdelta else gated_delta_peer,
        bars=bars,
        flops=6 * K * V + 4 * C * (K + V),
        numbers=2 * K + 2 * V,
    )


def _kda(B: int, T: int, H: int, K: int, V: int, bars: dict[str, float]) -> Case:
    return Case(
        op="kda",
        shape={"B": B, "T": T, "H": H, "K": K, "V": V},
        ours=chunk_delta,
        definition=recurrent_delta,
        inputs=partial(inputs, gate="channel", extra=("beta",)),
        peer="flash-linear-attention chunk_kda",
        peer_call=kda_peer,
        bars=bars,
        flops=6 * K * V + 4 * 16 * (K + V),
        numbers=4 * K + 2 * V,  # g is float32: two numbers' bytes
    )


def _ccq(B: int, T: int, H: int, K: int, bars: dict[str, float]) -> Case:
    return Case(
        op="ccq",
        shape={"B": B, "T": T, "H": H, "K": K, "V": K},
        ours=chunk_ccq,
        definition=recurrent_ccq,
        inputs=partial(inputs, gate=None, extra=("v", "eta")),
        peer="flash-linear-attention chunk_linear_attn with v = k, the rest in PyTorch",
        peer_call=curvature_peer,
        bars=bars,
        flops=4 * K * K + 4 * 32 * K,
        numbers=3 * K,
    )


CASES = (
    _delta("gated", 8, 4096, 6, 256, 512, {"fwd": 0.5, "fwd+bwd": 0.55}),
    _delta("qdelta", 8, 4096, 6, 256, 512, {"fwd": 0.5, "fwd+bwd": 0.55}),
    _delta("gated", 8, 4096, 16, 128, 128, {"fwd": 0.5, "fwd+bwd": 0.65}),
    _delta("gated", 1, 32768, 16, 128, 128, {"fwd": 0.5, "fwd+bwd": 0.6}),
    _kda(8, 4096, 16, 128, 128, {"fwd": 0.45, "fwd+bwd": 0.45}),
    _ccq(8, 4096, 6, 256, {"fwd+bwd": 0.4}),
)
