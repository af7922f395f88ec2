"""GPUs that kernels are compiled for: what each has for a program, and what its compiler does not take. Imports no Triton."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from needlework.ops.runtime.constant import constant

INTERPRETER = (0, 0)
AMD = (1, 0)  # in place of a compute capability: such a GPU takes the plainest rows of a launch table


class Target(NamedTuple):
    """`arch`: the compute capability by which rows of a launch table are picked; `shared`: bytes of shared memory that a program may
    have."""

    name: str
    arch: tuple[int, int]
    shared: int

    @property
    def amd(self) -> bool:
        return self.arch == AMD


LARGE, SMALL = 232448, 101376  # 227 and 99 KiB
TARGETS = {
    name: Target(name, arch, shared)
    for name, arch, shared in (
        ("sm_80", (8, 0), 166912),
        ("sm_89", (8, 9), SMALL),
        ("sm_90", (9, 0), LARGE),
        ("sm_100", (10, 0), LARGE),
        ("gfx942", AMD, 65536),
    )
}


def shared_memory(arch: tuple[int, int]) -> int:
    """Bytes that a program may have on a GPU of this compute capability; of one not named here the least that any since 8.0 has."""
    known = {target.arch: target.shared for target in TARGETS.values()} | {INTERPRETER: LARGE, (8, 7): 166912, (10, 3): LARGE}
    return known.get(arch, SMALL)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU, AMD's too, as PyTorch numbers them; without an index of the current one."""
    major, minor = _capability(device)  # a tuple of a traced function's own: `constant` says why
    return major, minor


@constant
def _capability(device: torch.device) -> tuple[int, int]:
    return _asked(torch.cuda.current_device() if device.index is None else device.index)


@cache  # PyTorch looks it up anew each time, and a call asks several times
def _asked(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def on_amd() -> bool:
    """Whether this PyTorch runs on AMD's GPUs."""
    return torch.version.hip is not None


def for_amd(constants: Mapping[str, Any]) -> dict[str, Any]:
    """A launch's constants as AMD's compiler takes them: products of float32 exact where NVIDIA's are three of TF32, nothing in PTX,
    and no options that only NVIDIA's has."""
    kept = {name: x for name, x in constants.items() if name not in ("maxnreg", "launch_pdl")}
    kept |= {name: 0 for name in ("ASM", "PDL") if name in kept}
    return {name: "ieee" if isinstance(x, str) and x == "tf32x3" else x for name, x in kept.items()}
