"""flash-linear-attention's PaTH attention: reflections through a bottleneck of 32 and a convolution of three taps, or either left out."""

from needlework.fields import Count
from needlework.layers import Attention, Path

from .described import Described
from .fla_model import model, parts
from .layout import Reading

OWN = {"attend.reflect.beta.weight": "bt_proj.weight", "attend.reflect.beta.bias": "bt_proj.bias"}
FULL = {"attend.reflect.w.weight": "w_proj.weight"}
LOW_RANK = {f"attend.reflect.w.{n}.weight": f"w_proj.{n}.weight" for n in range(2)}
CONVOLUTION = {"attend.reflect.conv.weight": "w_conv1d.weight"}


def path_attn(described: Described) -> Reading:
    heads, dim = described.take("num_heads", Count, 32), described.take("hidden_size", Count)
    described.only(use_forget_gate=(False,))
    described.ignore("elementwise_affine")  # its norms have weights whatever this says
    low_rank, conv = (described.take(name, bool, True) for name in ("use_low_rank_w", "use_w_shortconv"))
    mixer = Attention(
        heads=heads,
        kv_heads=described.take("num_kv_heads", Count | None, None),
        head_dim=parts(described, dim, 1.0, heads, "num_heads"),
        attend=Path(rank=32 if low_rank else None, conv=3 if conv else None),
    )
    return model(described, mixer, OWN | (LOW_RANK if low_rank else FULL) | (CONVOLUTION if conv else {}), letter="A")
