"""Every layout that is read, by config.json's model_type. A layout is a function of the config; its file has its names of tensors."""

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
from .qdelta import qdelta
from .qwen3 import qwen3

# A layout whose layer needlework gets joins here, with a file of its own.
LAYOUTS: dict[str, Callable[[Described], Reading]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gla": gla,
    "delta_net": delta_net,
    "gated_deltanet": gated_deltanet,
    "kda": kda,
    "qdelta": qdelta,
    "atma": atma,
}


def layout_of(described: Described) -> str:
    """The name of the layout; ValueError for a model_type that is none of LAYOUTS."""
    if "model_type" not in described and "attn_kernel_size" in described:
        return "atma"  # its authors write their fields alone
    kind = described.take("model_type", str)
    if kind not in LAYOUTS:
        raise ValueError(
            f"{described.where}: model_type is {kind!r}{nearest(kind, [*LAYOUTS])}, expected one of {', '.join(LAYOUTS)}"
        )
    return kind
