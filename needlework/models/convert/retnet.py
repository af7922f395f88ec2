"""flash-linear-attention's RetNet: the additive write with a fixed decay a head; q and k turn by their positions, in halves."""

from needlework.fields import Count, Positive
from needlework.layers import FixedGate, Linear, Recurrent, Rope

from .described import Described
from .fla_model import model, normed_and_gated, parts
from .layout import Reading


def retnet(described: Described) -> Reading:
    heads, dim = described.take("num_heads", Count, 8), described.take("hidden_size", Count)
    described.only(num_kv_heads=(None, heads), feature_map=(None,))
    described.ignore("use_short_conv", "conv_size")  # its model does not hand them to its layer
    gate, output = normed_and_gated(described)
    mixer = Recurrent(
        heads=heads,
        key_dim=parts(described, dim, described.take("expand_k", Positive, 1.0), heads, "expand_k"),
        value_dim=parts(described, dim, described.take("expand_v", Positive, 2.0), heads, "expand_v"),
        conv=None,
        position=Rope(),
        output_gate=gate,
        write=Linear(gate=FixedGate()),
    )
    return model(described, mixer, output, ratio=2)
