"""Every layout that is read, by config.json's model_type or, where it has none, by a key. A layout is a function of the config; its file
has its names of tensors."""

from collections.abc import Callable

from needlework.layers.config import nearest

from .atma import atma
from .delta_net import delta_net
from .described import Described
from .gated_deltanet import gated_deltanet
from .gla import gla
from .kda import kda
from .layout import Reading
from .llama import llama
from .mamba2 import mamba2
from .mamba2_fla import mamba2_fla
from .path_attn import path_attn
from .qdelta import qdelta
from .qwen3 import qwen3
from .retnet import retnet
from .state_spaces import state_spaces

# A layout whose layer needlework gets joins here, with a file of its own.
LAYOUTS: dict[str, Callable[[Described], Reading]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gla": gla,
    "delta_net": delta_net,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
    "retnet": retnet,
    "path_attn": path_attn,
    "mamba2": mamba2,
    "mamba2_fla": mamba2_fla,
    "state_spaces": state_spaces,
    "qdelta": qdelta,
    "atma": atma,
}


def layout_of(described: Described) -> str:
    """The name of the layout; ValueError for a model_type that is none of LAYOUTS."""
    if "model_type" not in described:  # their authors write their fields alone
        for name, key in (("atma", "attn_kernel_size"), ("state_spaces", "ssm_cfg")):
            if key in described:
                return name
    kind = described.take("model_type", str)
    if kind == "mamba2" and "norm_eps" in described:
        return "mamba2_fla"  # transformers says layer_norm_epsilon
    if kind not in LAYOUTS:
        raise ValueError(
            f"{described.where}: model_type is {kind!r}{nearest(kind, [*LAYOUTS])}, expected one of {', '.join(LAYOUTS)}"
        )
    return kind
