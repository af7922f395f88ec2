"""flash-linear-attention's DeltaNet: the delta rule without decay; no output gate unless the config says so."""

from needlework.fields import Count, Positive
from needlework.layers import Delta, Recurrent

from .described import Described
from .fla_model import convolved_or_silu, gated, model, parts
from .layout import Reading

OWN = {"write.beta.project.weight": "b_proj.weight", "norm.weight": "o_norm.weight"}


def delta_net(described: Described) -> Reading:
    heads, dim = described.take("num_heads", Count, 16), described.take("hidden_size", Count)
    described.only(use_beta=(True,), qk_norm=("l2",), qk_activation=("silu",))
    described.ignore("use_output_norm")  # its layer norms its output whatever this says
    conv, convolution = convolved_or_silu(described)
    gate, gate_names = gated(described, False)
    mixer = Recurrent(
        heads=heads,
        key_dim=parts(described, dim, described.take("expand_k", Positive, 1.0), heads, "expand_k"),
        value_dim=parts(described, dim, described.take("expand_v", Positive, 1.0), heads, "expand_v"),
        conv=conv,
        output_gate=gate,
        write=Delta(allow_neg_eigval=described.take("allow_neg_eigval", bool, False)),
    )
    return model(described, mixer, OWN | convolution | gate_names)
