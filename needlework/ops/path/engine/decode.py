"""PaTH's decoding as an operator of the kernels in step.py; their constants are in step.launch.json."""

from math import sqrt

import torch
from torch import Tensor

from needlework.ops.paged.placement import Placement
from needlework.ops.path.arguments import NewTokens
from needlework.ops.path.engine.step import carry, enter, merge, read
from needlework.ops.path.engine.walk import LOG2E
from needlework.ops.path.state import BLOCK, Tables
from needlework.ops.runtime.custom_op import fake, step_operator
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, launch_config, split
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.triton_types import NAMES, TYPES, accumulator, cdiv, padded

ENGINE = "path/step"
# flag -> arguments that kernels read with it alone
ONLY_WITH = {"DECAY": ("p_g", "p_decay", "p_page_decay"), "SOLVE": ("p_page_norm",)}
KERNELS = {"enter": enter, "read": read, "merge": merge, "carry": carry}


@step_operator("tables", "norm_pages")
def path_decode(
    tokens: NewTokens, tables: Tables, norm_pages: Tensor | None, where: Placement, slots: Tensor, P: int, window: int | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """o [N H V] of one new token a sequence. P: rows of a sequence's pages, or of its ring. All contiguous; pages and slots each by itself.
    norm_pages: the norms that LUCID-PaTH's keys came with; v_pages then holds y, and v is solved."""
    (q, _, v, _, _, g), (page_k, page_v, open_w, open_beta, page_decay), (table, length, rows, _) = tokens, tables, where
    (N, H, K), (HK, V) = q.shape, v.shape[1:]
    o = torch.empty(N, H, V, dtype=q.dtype, device=q.device)
    if not o.numel():
        return o
    chosen = launch_config(ENGINE, q.device, q.dtype, K, V)
    c = constants(chosen, q.dtype, H, HK, K, V, scale, g is not None, norm_pages is not None)
    (KB, VB), GB, own = (padded(K), padded(V)), c["enter"]["GB"], chosen.launch["read"]
    reach = min(P, window or P)
    parts = max(1, min(own["NP"] // (N * HK), cdiv(reach, 4 * own["BN"])))
    shares = parts + 1
    number = lambda *sizes: torch.empty(*sizes, dtype=accumulator(q.dtype), device=q.device)
    x, sums = number(N, HK, GB, KB), number(N, HK, shares, GB, VB)
    tops, alls = number(N, HK, shares, GB), number(N, HK, shares, GB)
    decay = None if g is None else torch.empty(N, HK, GB, dtype=torch.float64, device=q.device)
    PG, NB, W = page_k.shape[1], table.shape[1], window or 0
    sizes, apart = (P, PG, NB, W), (page_k.stride(0), page_v.stride(0))
    more_apart = [0 if x is None else x.stride(0) for x in (page_decay, norm_pages)]
    opened = open_w.stride(0), open_beta.stride(0)
    run(
        enter, (N * HK,), *tokens, *tables, norm_pages, table, slots, length, x, decay, sums, tops, alls, *sizes, shares, *apart, *opened,
        *more_apart, **c["enter"],
    )  # fmt: skip
    run(
        read, (N * HK * parts,), x, decay, page_k, page_v, page_decay, norm_pages, table, length, sums, tops, alls, *sizes, shares, *apart,
        *more_apart, **c["read"],
    )  # fmt: skip
    run(
        merge, (N * HK,), *tokens[:5], decay, *tables, norm_pages, slots, length, rows, sums, tops, alls, o, PG, shares, *apart, *opened,
        *more_apart, **c["merge"],
    )  # fmt: skip
    tiles = cdiv(reach, c["carry"]["BN"])
    run(
        carry, (N * HK * tiles,), page_k, open_w, open_beta, table, slots, length, *sizes, tiles, apart[0], *opened, **c["carry"]
    )  # fmt: skip
    return o


@fake(path_decode)
def _(tokens: NewTokens, *_):
    return tokens.q.new_empty(*tokens.q.shape[:2], tokens.v.shape[2])


def constants(
    config: LaunchConfig, dtype: torch.dtype, H: int, HK: int, K: int, V: int, scale: float, decay: bool = False, solve: bool = False
) -> dict[str, Constants]:  # fmt: skip
    """Kernel -> its constants, num_warps and the like."""
    everything = dict(
        H=H, HK=HK, K=K, V=V, KB=padded(K), VB=padded(V), GB=padded(H // HK + int(solve)), BLOCK=BLOCK, SCALE=scale * LOG2E,
        ROOT=sqrt(K) * LOG2E, DECAY=int(decay), SOLVE=int(solve), ACC=TYPES[accumulator(dtype)],
    )  # fmt: skip
    own: dict[str, Constants] = {name: {key: x for key, x in row.items() if key != "NP"} for name, row in config.launch.items()}
    for name, kernel in KERNELS.items():
        own[name] |= {key: x for key, x in everything.items() if key in kernel.arg_names}
    return own


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    own, wide = f"*{NAMES[dtype]}", f"*{NAMES[accumulator(dtype)]}"
    types = dict.fromkeys(("p_q", "p_k", "p_v", "p_w", "p_page_v", "p_open_w", "p_out"), own)
    types |= {"p_table": "*i32", "p_length": "*i32"} | dict.fromkeys(("p_slots", "p_rows"), "*i64")
    types |= dict.fromkeys(("p_decay", "p_page_decay"), "*fp64")
    of = lambda arg: types.get(arg, wide) if arg.startswith("p_") else "i32"
    cases = []
    for decay, solve in ((False, False), (True, False), (False, True)):
        for name, c in constants(config, dtype, 8, 2, K, V, K**-0.5, decay, solve).items():
            kernel = KERNELS[name]
            if "SOLVE" in kernel.arg_names or not (decay or solve):
                c, options = split(c)
                c |= absent(kernel, c, ONLY_WITH)
                cases.append(Case(kernel, {arg: of(arg) for arg in kernel.arg_names if arg not in c}, c, options))
    return cases
