"""transformers' Llama: softmax attention with rotary positions and grouped key-value heads, SwiGLU."""

from transformers import LlamaConfig

from .described import Described, filled
from .layout import Reading
from .softmax_decoder import decoder


def llama(described: Described) -> Reading:
    described = filled(described, LlamaConfig)
    reading = decoder(
        described, [None] * described.take("num_hidden_layers", int), mlp_bias=described.take("mlp_bias", bool)
    )  # fmt: skip
    described.finish()
    return reading
