"""The ATMA authors' layout: attention in layers 2, 6, 10, …, gated convolutions in the others; Polar or softmax, with or without memory.

Their config.json has no model_type; `attn_type` says which attention it is. Norms of q, k and the memory's read have the epsilon of
the dtype, as their code has it.
"""

from collections.abc import Mapping
from typing import Any

from needlework.fields import Count
from needlework.layers import Attention, Canon, Delta, GatedConv, HalfRope, Memory, Polar, RetentionGate, Softmax, SquaredReLU
from needlework.layers.norm import EPS
from needlework.layers.softmax import AttendConfig
from needlework.models.config import NeedleworkConfig

from .described import Described
from .layout import Names, Reading, in_layers

AROUND: Names = {
    "model.embed.weight": ("embed.weight",), "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("proj.weight",), "lm_head.bias": ("proj.bias",),
}  # fmt: skip
NORMS = {"mixer_norm.weight": "norm1.weight", "mlp_norm.weight": "norm2.weight"}
POLAR = {
    "mixer.attend.alpha": "attn.len_gain_raw", "mixer.attend.beta": "attn.mag_beta_raw",
    "mixer.attend.gamma": "attn.null_slope_raw", "mixer.attend.null_base": "attn.null_base",
    "mixer.attend.v_null": "attn.v_null",
}  # fmt: skip
CONV = {"mixer.conv.weight": "attn.conv.weight"}
CANON = {"mixer.conv.weight": ("attn.canon_q.weight", "attn.canon_k.weight", "attn.canon_v.weight")}


def _maps(named: Mapping[str, str]) -> dict[str, str]:
    """The weight and the bias of each map."""
    return {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in named.items() for leaf in ("weight", "bias")}


MLP = _maps({"mlp.fc": "mlp.fc", "mlp.proj": "mlp.proj"})
GATED_CONV = CONV | _maps({"mixer.in_proj": "attn.in_proj", "mixer.out_proj": "attn.out_proj"})
ATTENTION = _maps(
    {"mixer.q_proj": "attn.q", "mixer.k_proj": "attn.k", "mixer.v_proj": "attn.v", "mixer.o_proj": "attn.proj"}
)  # fmt: skip
COUNT = _maps({"mixer.attend.mag_proj": "attn.mu_proj"})
MEMORY = _maps(
    {
        "mixer.memory.write.gate.project": "attn.mem.w_gamma", "mixer.memory.write.beta.project": "attn.mem.w_beta",
        "mixer.memory.g_proj": "attn.mem.gate", "mixer.memory.mem_proj": "attn.mem.proj",
    }
)  # fmt: skip


def atma(described: Described) -> Reading:
    described.only(
        attn_type=("polar", "nope", "rope"), polar_variant=("full",), mem_beta_bias=(0.0,), rms_norm_eps=(EPS,),
        tie_word_embeddings=(False,),
    )  # fmt: skip
    # kernels that compute the same, and what only training does
    described.ignore(
        "num_random_keys", "attn_online", "attn_k_block", "attn_kernel", "mem_chunk", "mem_kernel", "wall_gate_bias"
    )
    layers, dim = described.take("num_hidden_layers", Count, 16), described.take("hidden_size", Count, 1024)
    head_dim, kind = described.take("head_dim", Count, 128), described.take("attn_type", str, "polar")
    described.ignore("attn_window")  # of training: the paper removes it before every measurement
    heads, canon = dim // head_dim, Canon(width=described.take("attn_kernel_size", Count, 4))
    offset, remembers = described.take("mem_gamma_bias", float, 3.9), described.take("mem_enabled", bool, True)
    attends: dict[str, tuple[AttendConfig, dict[str, Any]]] = {
        "polar": (Polar(), {"conv": canon}),
        "nope": (Softmax(), {"conv": canon}),
        "rope": (Softmax(scale=0.12), {"position": HalfRope()}),
    }
    attend, around = attends[kind]
    memory = Memory(write=Delta(gate=RetentionGate(offset=offset)), published_eps=True) if remembers else None
    attention = Attention(
        heads=heads, kv_heads=heads // 4, head_dim=head_dim, attend=attend, qk_norm=True, output_gate=True, bias=True,
        published_eps=True, memory=memory, **around,
    )  # fmt: skip
    convolution = GatedConv(width=described.take("conv_kernel_size", Count, 3), published_init=True)
    letters = ["a" if n % 4 == 2 else "c" for n in range(layers)]
    config = NeedleworkConfig(
        vocab_size=described.take("vocab_size", Count, 50_304), hidden_size=dim, layout="".join(letters),
        mixers={"a": attention, "c": convolution}, mlp=SquaredReLU(hidden=4 * dim), tie_word_embeddings=False, head_bias=True,
        softcap=15.0, initializer_range=None, zero_output=True, **described.tokens(),
    )  # fmt: skip
    mixer = ATTENTION | (CANON if kind != "rope" else {}) | (POLAR | COUNT if kind == "polar" else {})
    own = {"a": mixer | (MEMORY if remembers else {}), "c": GATED_CONV}
    names = dict(AROUND)
    for letter, of_mixer in own.items():
        at = [n for n in range(layers) if letters[n] == letter]
        names |= in_layers(at, "model.blocks.{}.", "blocks.{}.", NORMS | MLP | of_mixer)
    angles = [f"blocks.{n}.attn.rotary.angular_freq" for n in range(layers)] if kind == "rope" else []
    return Reading(config, names, frozenset(angles))
