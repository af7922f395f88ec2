"""flash-linear-attention's models: the same embedding, norms, SwiGLU and head around every mixer of theirs (read in 0.6.0)."""

from collections.abc import Mapping
from typing import Any

from needlework.fields import Count, NonNegative
from needlework.layers import ShortConv, Silu, SwiGLU
from needlework.layers.config import MixerConfig
from needlework.layers.conv import ConvConfig
from needlework.layers.norm import EPS
from needlework.models.config import NeedleworkConfig

from .described import Described
from .layout import Reading, in_layers

AROUND = {
    "model.embed.weight": ("model.embeddings.weight",),
    "model.norm.weight": ("model.norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
BLOCK = {
    "mixer_norm.weight": "attn_norm.weight", "mlp_norm.weight": "mlp_norm.weight", "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight", "mlp.down_proj.weight": "mlp.down_proj.weight",
}  # fmt: skip
PROJECTIONS = {f"{name}.weight": f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
CONVOLUTIONS = {"conv.weight": tuple(f"{name}_conv1d.weight" for name in "qkv")}


def model(
    described: Described, mixer: MixerConfig, names: Mapping[str, str | tuple[str, ...]], *, ratio: int = 4, letter: str = "R"
) -> Reading:
    """names: of the mixer's own tensors, ours and theirs, beside PROJECTIONS. ratio: of the MLP's width, where the config has none. letter:
    of the layout."""
    described.only(hidden_act=("swish", "silu"), norm_eps=(EPS,), attn=(None,), attnres_block_size=(None,))
    # kernels that compute the same, and what only training does
    described.ignore(
        "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    )  # fmt: skip
    layers, dim = (described.take(name, Count) for name in ("num_hidden_layers", "hidden_size"))
    ratio, hidden = described.take("hidden_ratio", Count | None, ratio), described.take("intermediate_size", Count | None, None)
    tied = described.take("tie_word_embeddings", bool, False)
    config = NeedleworkConfig(
        vocab_size=described.take("vocab_size", Count, 32_000), hidden_size=dim, layout=letter * layers, mixers={letter: mixer},
        mlp=SwiGLU(hidden=hidden or -(-int(dim * (ratio or 4) * 2 / 3) // 256) * 256), tie_word_embeddings=tied,
        initializer_range=described.take("initializer_range", NonNegative, 0.02), **described.tokens(),
    )  # fmt: skip
    own = {f"mixer.{mine}": _under("attn", theirs) for mine, theirs in (PROJECTIONS | dict(names)).items()}
    each = in_layers(range(layers), "model.blocks.{}.", "model.layers.{}.", BLOCK | own)
    around = {mine: theirs for mine, theirs in AROUND.items() if not (tied and mine == "lm_head.weight")}
    return Reading(config, around | each)


def convolved(described: Described, default: bool) -> tuple[ConvConfig | None, dict[str, Any]]:
    """The convolution of q, k and v, which is followed by silu, or None; and the names of its weight."""
    width = described.take("conv_size", Count, 4)
    if described.take("use_short_conv", bool, default):
        return ShortConv(width=width), CONVOLUTIONS
    return None, {}


def convolved_or_silu(described: Described) -> tuple[ConvConfig, dict[str, Any]]:
    """The same where q, k and v pass silu without a convolution."""
    conv, names = convolved(described, True)
    return conv or Silu(), names


def gated(described: Described, default: bool) -> tuple[bool, dict[str, Any]]:
    """Whether the output has the factor silu(W_g x), and the names of its map."""
    gate = described.take("use_gate", bool, default)
    return gate, {"g_proj.weight": "g_proj.weight"} if gate else {}


def normed_and_gated(described: Described) -> tuple[bool, dict[str, Any]]:
    """GLA's and RetNet's: whether the output has the factor silu(W_g x), and the names of its map and of the norm before it."""
    described.only(elementwise_affine=(True,))
    gate = described.take("use_output_gate", bool, True)
    fused = gate and described.take("fuse_norm", bool, True)  # one module then norms and gates
    names = {"norm.weight": "g_norm_swish_gate.weight" if fused else "g_norm.weight"}
    return gate, names | ({"g_proj.weight": "g_proj.weight"} if gate else {})


def parts(described: Described, whole: int, share: float, heads: int, name: str) -> int:
    """The channels of a head: `share` of `whole` in `heads` equal parts; ValueError for shares that give no whole number."""
    channels = whole * share / heads
    if channels != int(channels) or channels < 1:
        raise ValueError(f"{described.where}: {name} is {share}, which gives heads of {channels} channels")
    return int(channels)


def _under(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return f"{prefix}.{names}" if isinstance(names, str) else tuple(f"{prefix}.{name}" for name in names)
