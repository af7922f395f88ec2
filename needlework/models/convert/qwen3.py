"""transformers' Qwen3: Llama with normed queries and keys, each norm with a weight, and sliding windows in some layers of some models."""

from transformers import Qwen3Config

from needlework.fields import Count
from needlework.layers.norm import EPS

from .described import Described, filled
from .layout import Reading
from .softmax_decoder import decoder

NORMS = {"mixer.q_norm": "self_attn.q_norm", "mixer.k_norm": "self_attn.k_norm"}


def qwen3(described: Described) -> Reading:
    described = filled(described, Qwen3Config)
    described.only(rms_norm_eps=(EPS,))  # of the norms of q and k too
    described.ignore("use_sliding_window", "max_window_layers")  # layer_types is what follows from them
    windows = {"full_attention": None, "sliding_attention": described.take("sliding_window", Count | None)}
    kinds = described.take("layer_types", tuple[str, ...])
    if unknown := {*kinds} - windows.keys():
        raise ValueError(f"{described.where}: layer_types has {', '.join(sorted(unknown))}, expected {' or '.join(windows)}")
    reading = decoder(described, [windows[kind] for kind in kinds], qk_norm="weighted", norms=NORMS)
    described.finish()
    return reading
