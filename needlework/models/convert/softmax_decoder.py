"""transformers' decoders of softmax attention, rotary positions and SwiGLU: what Llama and Qwen3 share."""

from collections.abc import Sequence
from typing import Any, Literal

from needlework.fields import Count, NonNegative, Positive
from needlework.layers import Attention, Llama3Rope, Rope, Softmax, SwiGLU
from needlework.layers.rope import PositionConfig
from needlework.models.config import NeedleworkConfig

from .described import Described
from .layout import Names, Reading, in_layers

MODEL: Names = {"model.embed.weight": ("model.embed_tokens.weight",), "model.norm.weight": ("model.norm.weight",)}
HEAD: Names = {"lm_head.weight": ("lm_head.weight",)}
MATRICES = {
    "mixer.q_proj": "self_attn.q_proj", "mixer.k_proj": "self_attn.k_proj", "mixer.v_proj": "self_attn.v_proj",
    "mixer.o_proj": "self_attn.o_proj", "mlp.gate_proj": "mlp.gate_proj", "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}  # fmt: skip
NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
WINDOWED, FULL = "w", "a"  # letters of the layout


def decoder(
    described: Described,
    windows: Sequence[int | None],
    *,
    qk_norm: bool | Literal["weighted"] = False,
    mlp_bias: bool = False,
    norms: dict[str, str] | None = None,
) -> Reading:
    """windows: of each layer, None: it sees every key. norms: names of the layer's norms beside NORMS."""
    described.only(hidden_act=("silu", "swish"))
    described.ignore("attention_dropout", "pretraining_tp")
    layers, dim, heads = (described.take(n, Count) for n in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    bias = described.take("attention_bias", bool)
    head_dim = described.take("head_dim", Count | None) or dim // heads
    common: dict[str, Any] = {"heads": heads, "kv_heads": described.take("num_key_value_heads", Count), "head_dim": head_dim}
    common |= {"bias": bias, "qk_norm": qk_norm, "position": rotary(described)}
    if len({*windows} - {None}) > 1:
        raise ValueError(f"{described.where}: windows of several sizes ({windows})")
    mixers = {FULL if w is None else WINDOWED: Attention(attend=Softmax(window=w), **common) for w in windows}
    mlp = SwiGLU(hidden=described.take("intermediate_size", Count), bias=mlp_bias)
    tied = described.take("tie_word_embeddings", bool)
    config = NeedleworkConfig(
        vocab_size=described.take("vocab_size", Count), hidden_size=dim, mixers=mixers, mlp=mlp, tie_word_embeddings=tied,
        layout="".join(FULL if w is None else WINDOWED for w in windows), norm_eps=described.take("rms_norm_eps", Positive),
        initializer_range=described.take("initializer_range", NonNegative), **described.tokens(),
    )  # fmt: skip
    with_bias = {name: (bias if name.startswith("mixer") else mlp_bias) for name in MATRICES}
    names = {f"{mine}.weight": f"{theirs}.weight" for mine, theirs in (MATRICES | NORMS | (norms or {})).items()}
    names |= {f"{mine}.bias": f"{theirs}.bias" for mine, theirs in MATRICES.items() if with_bias[mine]}
    each = in_layers(range(layers), "model.blocks.{}.", "model.layers.{}.", names)
    return Reading(config, MODEL | each | ({} if tied else HEAD), frozenset(_angles(layers)))


def rotary(described: Described) -> PositionConfig:
    """The rotary positions; ValueError for kinds that needlework has not."""
    rope = Described(described.take("rope_parameters", dict), f"{described.where}: rope_parameters")
    rope.only(rope_type=("default", "llama3"), type=("default", "llama3"), partial_rotary_factor=(1.0,))
    base = rope.take("rope_theta", Positive)
    if rope.take("rope_type", str, "default") == "default":
        rope.finish()
        return Rope(base=base)
    turned = Llama3Rope(
        base=base, factor=rope.take("factor", Positive), low=rope.take("low_freq_factor", Positive),
        high=rope.take("high_freq_factor", Positive), length=rope.take("original_max_position_embeddings", Count),
    )  # fmt: skip
    rope.finish()
    return turned


def _angles(layers: int) -> list[str]:
    """Buffers that transformers wrote before it made them anew at each start."""
    return [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(layers)] + ["model.rotary_emb.inv_freq"]
