"""flash-linear-attention's Gated DeltaNet: the delta rule with a decay a head, −e^{A_log} softplus(W_a x + dt_bias)."""

from needlework.fields import Count, Positive
from needlework.layers import Delta, Recurrent, ScalarGate
from needlework.layers.write import WriteConfig

from .described import Described
from .fla_model import convolved_or_silu, gated, model, parts
from .layout import Reading

OWN = {
    "write.beta.project.weight": "b_proj.weight", "write.gate.project.weight": "a_proj.weight", "write.gate.A_log": "A_log",
    "write.gate.dt_bias": "dt_bias", "norm.weight": "o_norm.weight",
}  # fmt: skip


def gated_deltanet(described: Described) -> Reading:
    described.only(output_gate_activation=("swish", "silu"))
    doubled = described.take("allow_neg_eigval", bool, False)
    return gated_delta(described, Delta(gate=ScalarGate(), allow_neg_eigval=doubled), {})


def gated_delta(described: Described, write: WriteConfig, names: dict[str, str]) -> Reading:
    """The layer around a rule with this gate, whose other tensors are `names`."""
    heads, key_dim = described.take("num_heads", Count, 6), described.take("head_dim", Count, 256)
    conv, convolution = convolved_or_silu(described)
    gate, gate_names = gated(described, True)
    mixer = Recurrent(
        heads=heads,
        value_heads=described.take("num_v_heads", Count | None, None),
        key_dim=key_dim,
        value_dim=parts(described, key_dim, described.take("expand_v", Positive, 2.0), 1, "expand_v"),
        conv=conv,
        output_gate=gate,
        write=write,
    )
    return model(described, mixer, OWN | names | convolution | gate_names)
