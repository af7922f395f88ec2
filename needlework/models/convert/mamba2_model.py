"""Mamba-2 as its authors' code, transformers and flash-linear-attention have it.

The rows of in_proj are z, x, B, C, Δ and the channels of conv1d x, B, C. Ours has a map each, q = C, k = B, v = x and the gate z, and
convolves q, k, v in this order.
"""

import math

from needlework.fields import AtLeastTwo, Count, NonNegative
from needlework.layers import GatedNorm, Mamba2, Recurrent, ShortConv
from needlework.models.config import NeedleworkConfig

from .described import Described
from .layout import Names, Reading, in_layers

UNLIMITED = ([0.0, math.inf], (0.0, math.inf))  # of the step Δ, which no layer of ours bounds
BLOCK: dict[str, str | tuple[str, ...]] = {
    "mixer_norm.weight": "norm.weight", "mixer.q_proj.weight": "mixer.in_proj.weight[C]",
    "mixer.k_proj.weight": "mixer.in_proj.weight[B]", "mixer.v_proj.weight": "mixer.in_proj.weight[x]",
    "mixer.g_proj.weight": "mixer.in_proj.weight[z]", "mixer.write.project.weight": "mixer.in_proj.weight[dt]",
    "mixer.write.dt_bias": "mixer.dt_bias", "mixer.write.A_log": "mixer.A_log", "mixer.write.D": "mixer.D",
    "mixer.norm.weight": "mixer.norm.weight", "mixer.o_proj.weight": "mixer.out_proj.weight",
}  # fmt: skip


def layer(
    described: Described, groups: tuple[str, int], *, heads: int, key_dim: int, value_dim: int, taps: int, bias: bool, eps: float
) -> Recurrent:  # fmt: skip
    """groups: of B and C, and the key that says how many; ValueError if they do not divide the heads."""
    key, count = groups
    if heads % count:
        raise ValueError(f"{described.where}: {key} is {count}, expected a divisor of its {heads} heads")
    return Recurrent(
        heads=count, value_heads=heads, key_dim=key_dim, value_dim=value_dim, write=Mamba2(), norm=GatedNorm(eps=eps),
        conv=ShortConv(width=taps, bias=bias),
    )  # fmt: skip


def model(
    described: Described,
    mixer: Recurrent,
    *,
    layers: int,
    dim: int,
    vocabulary: int,
    tied: bool,
    eps: float,
    start: float = 0.02,
    embedding: str = "embeddings",
) -> Reading:
    """start: the standard deviation of matrices that start from random numbers. embedding: its name within backbone."""
    config = NeedleworkConfig(
        vocab_size=vocabulary, hidden_size=dim, layout="M" * layers, mixers={"M": mixer}, mlp=None, tie_word_embeddings=tied,
        norm_eps=eps, initializer_range=start, **described.tokens(),
    )  # fmt: skip
    assert isinstance(mixer.conv, ShortConv) and mixer.value_heads is not None
    leaves = ("weight", "bias") if mixer.conv.bias else ("weight",)
    convolved = {f"mixer.conv.{leaf}": tuple(f"mixer.conv1d.{leaf}[{part}]" for part in "CBx") for leaf in leaves}
    around: Names = {"model.embed.weight": (f"backbone.{embedding}.weight",), "model.norm.weight": ("backbone.norm_f.weight",)}
    around |= {} if tied else {"lm_head.weight": ("lm_head.weight",)}
    each = in_layers(range(layers), "model.blocks.{}.", "backbone.layers.{}.", BLOCK | convolved)
    channels = {"x": mixer.value_heads * mixer.value_dim, "B": mixer.heads * mixer.key_dim, "C": mixer.heads * mixer.key_dim}
    rows = {"in_proj.weight": {"z": channels["x"], **channels, "dt": mixer.value_heads}}
    rows |= {f"conv1d.{leaf}": channels for leaf in leaves}
    cut = {f"backbone.layers.{n}.mixer.{name}": parts for n in range(layers) for name, parts in rows.items()}
    return Reading(config, around | each, cut=cut)


def described_model(described: Described, eps: float) -> Reading:
    """The model of the keys that transformers and flash-linear-attention share. eps: of every norm."""
    described.only(hidden_act=("silu", "swish"), use_bias=(False,))
    # kernels that compute the same, what follows from other keys, and what only training does
    described.ignore("chunk_size", "residual_in_fp32", "expand", "rescale_prenorm_residual")
    mixer = layer(
        described, ("n_groups", described.take("n_groups", Count)), heads=described.take("num_heads", Count),
        key_dim=described.take("state_size", Count), value_dim=described.take("head_dim", Count), eps=eps,
        taps=described.take("conv_kernel", AtLeastTwo), bias=described.take("use_conv_bias", bool),
    )  # fmt: skip
    return model(
        described, mixer, layers=described.take("num_hidden_layers", Count), dim=described.take("hidden_size", Count), eps=eps,
        vocabulary=described.take("vocab_size", Count), tied=described.take("tie_word_embeddings", bool, False),
        start=described.take("initializer_range", NonNegative, 0.02),
    )  # fmt: skip
