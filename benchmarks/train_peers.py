"""flash-linear-attention's layers in our blocks: the same model around them, so that only the mixer differs. Never imported by the
package."""

from collections.abc import Callable
from importlib import import_module

from torch import nn

from needlework.recipes.comparison import Size


def _fla(name: str, **settings) -> nn.Module:
    # its guard refuses this backward on Hopper under Triton 3.4-3.7.0; at these head shapes the miscompiled tile is not used
    import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return getattr(import_module("fla.layers"), name)(mode="chunk", **settings)


def _wide(size: Size) -> dict:
    w = size.wide
    return {
        "hidden_size": size.dim,
        "num_heads": w["heads"],
        "head_dim": w["key_dim"],
        "expand_v": w["value_dim"] // w["key_dim"],
    }


def _gla(size: Size) -> nn.Module:
    w = size.wide
    expand = {"expand_k": w["heads"] * w["key_dim"] / size.dim, "expand_v": w["heads"] * w["value_dim"] / size.dim}
    return _fla("GatedLinearAttention", hidden_size=size.dim, num_heads=w["heads"], **expand)


# mixer of the comparison -> the layer that does the same; Q-Delta is its Comba
PEERS: dict[str, Callable[[Size], nn.Module]] = {
    "gated-deltanet": lambda s: _fla("GatedDeltaNet", **_wide(s)),
    "qdelta": lambda s: _fla("Comba", **_wide(s)),
    "gla": _gla,
    "kda": lambda s: _fla("KimiDeltaAttention", hidden_size=s.dim, num_heads=s.square["heads"], head_dim=s.square["key_dim"]),
}


class Mixer(nn.Module):
    """A layer of theirs with the call of ours: (x, state, cu_seqlens, output_final_state) -> (y, state)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x, state=None, cu_seqlens=None, output_final_state=False):
        return self.layer(x)[0], None
