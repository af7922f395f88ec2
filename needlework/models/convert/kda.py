"""flash-linear-attention's KDA: the delta rule with a decay a key channel, and an output gate σ(W₂ W₁ x + b) after the norm."""

from needlework.fields import Count, Positive
from needlework.layers import ChannelGate, Delta, OutputGate, Recurrent

from .described import Described
from .fla_model import convolved_or_silu, model, parts
from .layout import Reading

OWN = {
    "write.beta.project.weight": "b_proj.weight", "write.gate.project.0.weight": "f_proj.0.weight",
    "write.gate.project.1.weight": "f_proj.1.weight", "write.gate.A_log": "A_log", "write.gate.dt_bias": "dt_bias",
    "g_proj.0.weight": "g_proj.0.weight", "g_proj.1.weight": "g_proj.1.weight", "g_proj.1.bias": "g_proj.1.bias",
    "norm.weight": "o_norm.weight",
}  # fmt: skip


def kda(described: Described) -> Reading:
    described.only(safe_gate=(False,), lower_bound=(None,))
    key_dim = described.take("head_dim", Count, 128)
    conv, convolution = convolved_or_silu(described)
    mixer = Recurrent(
        heads=described.take("num_heads", Count, 16),
        value_heads=described.take("num_v_heads", Count | None, None),
        key_dim=key_dim,
        value_dim=parts(described, key_dim, described.take("expand_v", Positive, 1.0), 1, "expand_v"),
        conv=conv,
        output_gate=OutputGate(),
        write=Delta(gate=ChannelGate(), allow_neg_eigval=described.take("allow_neg_eigval", bool, False)),
    )
    return model(described, mixer, OWN | convolution)
