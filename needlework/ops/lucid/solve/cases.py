"""Every kernel of the solve with the types and constants that a call may give it, to be compiled without one."""

import torch
from triton import JITFunction

from needlework.ops.lucid.solve.launches import KERNELS, constants, flags, operand_dtype
from needlework.ops.runtime.launch_configs import Case, Constants, LaunchConfig, absent, split
from needlework.ops.runtime.triton_types import NAMES, accumulator

# flag -> arguments that kernels read with it alone
ONLY_WITH = {
    "BETA": ("p_beta", "p_dbeta", "p_r"),
    "SAVE_R": ("p_r",),
    "ROWMAX": ("p_top", "p_zv"),
    "REV": ("p_zv",),
    "PACKED": ("p_cum", "p_order"),
    "GIVEN": ("p_skip",),
}


def compile_cases(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """Every kernel of a forward and of a backward; with β in a window, and with μ in a window of packed sequences after pages."""
    cases = []
    for beta, rowmax in ((False, False), (True, False), (False, True)):
        everything = constants(config, dtype, 2, K, V, K, rowmax, beta, beta or rowmax, rowmax)
        for name, row in everything.items():
            # what a variant does not touch, what it does not launch
            if (
                (name in ("keys", "peak") and beta)
                or (name == "top" and not rowmax)
                or (name == "solve" and "panel" in everything)
            ):
                continue
            types = _types(dtype, name, rowmax)
            for REV in (False, True) if "REV" in KERNELS[name].arg_names else (False,):
                set_now = flags(name, REV=REV, SAVE_R=beta and not REV, GIVEN=rowmax)
                cases.append(_case(name, row | set_now, types, dtype, config.tma))
    return cases


def compile_cases_of_sums(config: LaunchConfig, dtype: torch.dtype, K: int, V: int) -> list[Case]:
    """The kernels that read a right side, where that is not v but of the sums' dtype, of packed sequences in a window."""
    cases = []
    for beta, rowmax in ((True, False), (False, True)):
        everything = constants(config, dtype, 2, K, V, K, rowmax, beta, True, True)
        wide = dict.fromkeys(("p_rhs", "p_out", "p_v", "p_x"), NAMES[accumulator(dtype)])  # p_x: the peak's right side
        for name in ("peak", "before_panel", "panel") if "panel" in everything else ("peak", "solve"):
            types = _types(dtype, name, rowmax) | wide
            cases.append(
                _case(name, everything[name] | flags(name, REV=False, SAVE_R=False, GIVEN=False), types, dtype, config.tma)
            )
    return cases


def _types(dtype: torch.dtype, kernel: str, rowmax: bool) -> dict[str, str]:
    """Of a kernel's arguments, where they are not sums."""
    own, st = NAMES[dtype], NAMES[operand_dtype(dtype)]
    integers = ("p_top", "p_peak", "p_row_peak", "p_peak_y", "p_peak_z", "p_rows_y", "p_rows_z", "p_cum", "p_skip", "p_order")
    types = dict.fromkeys((*integers, "p_done", "p_ticket"), "i32")
    types |= dict.fromkeys(("p_k", "p_v", "p_rhs", "p_out", "p_dy", "p_dk"), own)
    types |= dict.fromkeys(("p_x", "p_I", "p_y", "p_r", "p_z", "x_k", "x_y", "x_z"), st)
    return types | ({"x_k": own, "p_x": own} if rowmax or kernel == "peak" else {})


def _case(name: str, row: Constants, types: dict[str, str], dtype: torch.dtype, tma: bool) -> Case:
    kernel, (c, options) = KERNELS[name], split(row)
    c = {key: x for key, x in c.items() if key in kernel.arg_names}
    c |= absent(kernel, c, ONLY_WITH)
    return Case(kernel, _signature(kernel, c, types, NAMES[accumulator(dtype)], tma), c, options)


def _signature(kernel: JITFunction, constants: Constants, types: dict[str, str], wide: str, tma: bool) -> dict[str, str]:
    """The types of what `kernel` takes beside its constants: pointers of `types`, or else `wide`, descriptors, integers."""
    found = {}
    for arg in kernel.arg_names:
        if tma and arg.startswith("x_"):
            width = constants["VB" if arg in ("x_y", "x_z") else "KB"]
            found[arg] = f"tensordesc<{types[arg]}[1, 1, {constants['C']}, {width}]>"
        elif arg not in constants:
            found[arg] = f"*{types.get(arg, wide)}" if arg.startswith(("p_", "x_")) else "i32"
    return found
