"""What `needlework doctor` judges, in one place: a new rule is a line of RULES, a new launch table a line of ENGINES."""

from functools import partial
from itertools import takewhile
from typing import NamedTuple

from needlework.ops.runtime.denylist import denied
from needlework.ops.runtime.launch_configs import LaunchConfig, rows

# launch table -> the files that hold its kernels
ENGINES = {
    "delta/scalar": (
        "delta.scalar.forward",
        "delta.powers",
        "delta.scalar.backward",
        "delta.scalar.transitions",
        "delta.segments",
        "common.kernels.moves",
        "common.kernels.groups",
    ),
    "delta/additive": ("delta.additive.launches", "delta.segments", "common.kernels.groups"),
    "delta/channel": (
        "delta.channel.intra",
        "delta.channel.scan",
        "delta.channel.backward",
        "common.kernels.groups",
        "slots.kernels",
        "slots.rows",
        "carve.feedback.forward",
        "carve.feedback.backward",
    ),
    "delta/step": ("delta.step",),
    "ccq/curvature": (
        "ccq.curvature.intra",
        "ccq.curvature.scan",
        "ccq.curvature.intra_bwd",
        "ccq.curvature.scan_bwd",
        "ccq.curvature.segments",
        "delta.segments",
    ),
    "ccq/step": ("ccq.step",),
    "carve/step": ("carve.step",),
    "unit/rows": ("unit.rows",),
    "conv/depthwise": ("conv.depthwise.op",),
    "linear/few_rows": ("linear.few_rows", "linear.few_heads"),
    "lucid/solve": ("lucid.solve.cases",),
    "lucid/step": ("lucid.step",),
    "lucid/pages": ("lucid.solve.by_table",),
    "lucid/decode": ("lucid.decode.op",),
    "polar/attention": ("polar.attention.launches",),
    "path/engine": ("path.engine.op", "path.engine.pages", "path.solve.engine.op", "path.solve.engine.pages"),
    "path/step": ("path.engine.decode",),
    "paged/paged": ("paged.engine.op",),
    "mamba3/siso": ("mamba3.siso.launches", "mamba3.siso.powers"),
    "mamba3/step": ("mamba3.step",),
}


class Rule(NamedTuple):
    """A spec, and the launch tables of its chunk form and of its step, None for none. `covers`: its calls launch every kernel that a
    rule of the same tables does, with the most arguments. `keys_alone`: it has no values, and sizes K = V. `several`: its step takes
    a few tokens too. `grows`: its step may make a state longer. `long`, `wide`: tokens of the one long sequence, and of each of 48."""

    spec: str
    chunk: str
    step: str | None
    covers: bool = False
    keys_alone: bool = False
    several: bool = False
    grows: bool = False
    long: int = 3000
    wide: int = 75


# attention's printed forms take a pair of blocks at a time: as many as make a chain, and as more blocks than programs
_pairs = partial(Rule, long=1000, wide=300)

RULES = (
    Rule("qdelta", "delta/scalar", "delta/step", covers=True, grows=True),
    Rule("qdelta/grouped", "delta/scalar", "delta/step"),
    Rule("delta/gated", "delta/scalar", "delta/step"),
    Rule("delta/grouped", "delta/additive", "delta/step", covers=True),
    Rule("delta/gdn2", "delta/channel", "delta/step", covers=True),
    Rule("delta/kda", "delta/channel", "delta/step"),
    Rule("delta/previous", "delta/channel", "delta/step"),
    Rule("delta/given", "delta/channel", "delta/step"),
    Rule("delta/gla", "delta/channel", "delta/step"),
    Rule("carve", "delta/channel", "carve/step", covers=True, long=1000),  # nothing of it is cut into segments
    Rule("carve/rank4", "delta/channel", "carve/step"),
    Rule("carve/decayed", "delta/channel", "carve/step", long=1000),
    Rule("ccq/aligned", "ccq/curvature", "ccq/step", covers=True, keys_alone=True),
    Rule("ccq", "ccq/curvature", "ccq/step", keys_alone=True),
    Rule("ccq/grouped", "ccq/curvature", "ccq/step", keys_alone=True),
    Rule("l2norm", "unit/rows", None, covers=True, keys_alone=True),
    Rule("conv", "conv/depthwise", None, covers=True, keys_alone=True),
    Rule("conv/unit", "conv/depthwise", None, covers=True, keys_alone=True),
    Rule("conv/slots", "conv/depthwise", None, covers=True, keys_alone=True),
    Rule("linear", "linear/few_rows", None, covers=True, keys_alone=True),
    _pairs("lucid", "lucid/solve", "lucid/step", covers=True, several=True),
    _pairs("lucid/beta", "lucid/solve", "lucid/step", several=True),
    _pairs("lucid/rowmax", "lucid/solve", "lucid/step", several=True),
    _pairs("lucid/window", "lucid/solve", "lucid/step", several=True),
    _pairs("lucid/rowmax-window", "lucid/solve", "lucid/step", several=True),
    _pairs("lucid/pages", "lucid/pages", None, covers=True),
    _pairs("lucid/window-pages", "lucid/pages", None),
    _pairs("lucid/rowmax-pages", "lucid/pages", None),
    Rule("lucid/decode", "lucid/decode", None, covers=True, long=300, wide=40),  # every token is a sequence and a block
    Rule("lucid/window-decode", "lucid/decode", None, long=300, wide=40),
    Rule("lucid/rowmax-decode", "lucid/decode", None, long=300, wide=40),
    _pairs("polar", "polar/attention", "paged/paged", covers=True),
    _pairs("polar/window", "polar/attention", "paged/paged"),
    _pairs("polar/grouped", "polar/attention", "paged/paged"),
    Rule("path", "path/engine", "path/step", covers=True, long=1100, wide=300),  # three superblocks, the last one cut
    Rule("path/window", "path/engine", "path/step", long=1100, wide=300),
    Rule("path/fox", "path/engine", "path/step", covers=True, long=1100, wide=300),
    Rule("path/lucid", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-window", "path/engine", None, long=1100, wide=300),
    Rule("path/pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/window-pages", "path/engine", None, long=1100, wide=300),
    Rule("path/fox-pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-window-pages", "path/engine", None, long=1100, wide=300),
    Rule("path/lucid-read-pages", "path/engine", None, covers=True, long=1100, wide=300),
    Rule("path/lucid-window-read-pages", "path/engine", None, long=1100, wide=300),
    _pairs("paged/softmax", "paged/paged", None, covers=True),
    _pairs("paged/forgetting", "paged/paged", None, covers=True),
    _pairs("paged/differential", "paged/paged", None, covers=True),
    _pairs("paged/polar", "paged/paged", None, covers=True),
    Rule("mamba3", "mamba3/siso", "mamba3/step", covers=True),
    Rule("mamba3/mimo", "delta/scalar", "mamba3/step"),
)


SIZES = (
    (16, 16),
    (32, 32),
    (32, 256),
    (100, 60),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (64, 256),
    (128, 192),
    (192, 128),
    (192, 192),
    (128, 256),
    (64, 512),
    (96, 512),
    (128, 512),
    (256, 128),
    (256, 256),
    (256, 512),
)  # K, V


def taken(row: LaunchConfig, arch: tuple[int, int], dtype: str, keys_alone: bool = False) -> list[tuple[int, int]]:
    """Sizes at which the row is taken here, smallest first: every earlier row that fits is on the denylist."""
    earlier = [x for x in takewhile(lambda x: x.name != row.name, rows(row.engine)) if not denied(x.engine, x.name, dtype)]
    fits = [size for size in SIZES if row.misfit(arch, dtype, *size) is None]
    return _square([size for size in fits if all(other.misfit(arch, dtype, *size) for other in earlier)], keys_alone)


def sizes(row: LaunchConfig, arch: tuple[int, int], dtype: str, keys_alone: bool = False) -> list[tuple[int, int]]:
    """Those at which the row is taken, or, if there is none, may be where earlier ones are on the denylist."""
    fits = [size for size in SIZES if row.misfit(arch, dtype, *size) is None]
    return taken(row, arch, dtype, keys_alone) or _square(fits, keys_alone)


def _square(chosen: list[tuple[int, int]], keys_alone: bool) -> list[tuple[int, int]]:
    return [(K, K) for K in dict.fromkeys(K for K, _ in chosen)] if keys_alone else chosen
