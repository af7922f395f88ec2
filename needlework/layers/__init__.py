"""Sequence mixers as modules: `build("qdelta", dim=256, heads=4)` makes one by its name, a config's `.build(dim)` any that it says.

`forward(x, state, cu_seqlens, output_final_state) -> (y, state)` runs each. The classes below are the configs: a mixer is a
`Recurrent` of a write rule, a gate and a read rule, an `Attention` of an attend rule, positions and a memory, a `Mamba3` or a `GatedConv`.
"""

from needlework.layers.alibi import Alibi as Alibi
from needlework.layers.attention import Attention as Attention
from needlework.layers.carve import Carve as Carve
from needlework.layers.catalog import CATALOG as CATALOG
from needlework.layers.catalog import build as build
from needlework.layers.ccq import CCQ as CCQ
from needlework.layers.ccq import Plain as Plain
from needlework.layers.comba import Comba as Comba
from needlework.layers.config import Config as Config
from needlework.layers.config import from_dict as _from_dict
from needlework.layers.conv import Canon as Canon
from needlework.layers.conv import GatedConv as GatedConv
from needlework.layers.conv import ShortConv as ShortConv
from needlework.layers.conv import Silu as Silu
from needlework.layers.delta import Delta as Delta
from needlework.layers.delta_product import DeltaProduct as DeltaProduct
from needlework.layers.differential import Differential as Differential
from needlework.layers.distract import Distractor as Distractor
from needlework.layers.features import Hedgehog as Hedgehog
from needlework.layers.features import distillation as distillation
from needlework.layers.fox import Fox as Fox
from needlework.layers.gates import ChannelGate as ChannelGate
from needlework.layers.gates import FixedGate as FixedGate
from needlework.layers.gates import LowRankGate as LowRankGate
from needlework.layers.gates import RetentionGate as RetentionGate
from needlework.layers.gates import ScalarGate as ScalarGate
from needlework.layers.gdn2 import Gdn2 as Gdn2
from needlework.layers.linear import Linear as Linear
from needlework.layers.longhorn import Longhorn as Longhorn
from needlework.layers.lucid import Lucid as Lucid
from needlework.layers.lucid_path import LucidPath as LucidPath
from needlework.layers.mamba import Mamba as Mamba
from needlework.layers.mamba2 import Mamba2 as Mamba2
from needlework.layers.mamba3 import Mamba3 as Mamba3
from needlework.layers.memory import Memory as Memory
from needlework.layers.mlp import SquaredReLU as SquaredReLU
from needlework.layers.mlp import SwiGLU as SwiGLU
from needlework.layers.objective import Objective as Objective
from needlework.layers.output import GatedNorm as GatedNorm
from needlework.layers.output import HeadNorm as HeadNorm
from needlework.layers.output import OutputGate as OutputGate
from needlework.layers.path import Path as Path
from needlework.layers.polar import Polar as Polar
from needlework.layers.qdelta import QDelta as QDelta
from needlework.layers.recurrent import Recurrent as Recurrent
from needlework.layers.regularise import Discrete as Discrete
from needlework.layers.regularise import Strong as Strong
from needlework.layers.regularise import Weak as Weak
from needlework.layers.regularise import Zipfian as Zipfian
from needlework.layers.rope import HalfRope as HalfRope
from needlework.layers.rope import Llama3Rope as Llama3Rope
from needlework.layers.rope import PairRope as PairRope
from needlework.layers.rope import Rope as Rope
from needlework.layers.rwkv7 import Rwkv7 as Rwkv7
from needlework.layers.softmax import Softmax as Softmax
from needlework.layers.ssmax import SSMax as SSMax

WRITES = (Linear, Mamba2, Delta, DeltaProduct, Longhorn, Comba, Gdn2, Rwkv7, QDelta, Carve)
GATES = (ScalarGate, ChannelGate, LowRankGate, RetentionGate, FixedGate)
READS = (Plain, CCQ)
ATTENDS = (Softmax, SSMax, Alibi, Fox, Lucid, Polar, Differential, Path, LucidPath)
POSITIONS = (Rope, Llama3Rope, HalfRope, PairRope)
FEATURES = (Hedgehog,)
NORMS = (HeadNorm, GatedNorm)
CONVS = (ShortConv, Canon, Silu)
MIXERS = (Recurrent, Attention, GatedConv, Mamba, Mamba3)
MLPS = (SwiGLU, SquaredReLU)
REGULARISERS = (Weak, Strong, Discrete, Zipfian)
OBJECTIVES = (Objective, Distractor, *REGULARISERS)
KINDS = (
    *MIXERS,
    *WRITES,
    *GATES,
    *FEATURES,
    *READS,
    *ATTENDS,
    Memory,
    *POSITIONS,
    *CONVS,
    *NORMS,
    OutputGate,
    *MLPS,
    *OBJECTIVES,
)


def from_dict(data: dict) -> Config:
    """The component config that `Config.to_dict` wrote.

    Raises ValueError for an unknown kind or field, with the nearest known name, and for a missing field.

    >>> from needlework.layers import from_dict
    >>> from_dict({"kind": "qdelta", "lam": 0.5}).lam
    0.5
    """
    return _from_dict(data, KINDS)
