"""flash-linear-attention's GLA: the additive write, a decay a key channel of rank 16 through logsigmoid/16, an output gate."""

from needlework.fields import Count, Positive
from needlework.layers import Linear, LowRankGate, Recurrent

from .described import Described
from .fla_model import convolved, model, normed_and_gated, parts
from .layout import Reading

GATE = {
    "write.gate.project.0.weight": "gk_proj.0.weight", "write.gate.project.1.weight": "gk_proj.1.weight",
    "write.gate.project.1.bias": "gk_proj.1.bias",
}  # fmt: skip


def gla(described: Described) -> Reading:
    heads, dim = described.take("num_heads", Count, 4), described.take("hidden_size", Count)
    described.only(num_kv_heads=(None, heads), feature_map=(None,), clamp_min=(None,), use_gk=(True,), use_gv=(False,))
    conv, convolution = convolved(described, False)
    gate, output = normed_and_gated(described)
    mixer = Recurrent(
        heads=heads,
        key_dim=parts(described, dim, described.take("expand_k", Positive, 0.5), heads, "expand_k"),
        value_dim=parts(described, dim, described.take("expand_v", Positive, 1.0), heads, "expand_v"),
        conv=conv,
        output_gate=gate,
        write=Linear(gate=LowRankGate(rank=16, temperature=16.0)),
    )
    return model(described, mixer, GATE | convolution | output)
