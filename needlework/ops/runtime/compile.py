"""Kernels compiled without a GPU: registers, shared memory, spills, machine code, and the versions of the tools."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import KernelParam

from needlework.ops.runtime.launch_configs import Case

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    kernel: str
    registers: int
    shared: int  # bytes
    spilled: int  # bytes a thread, stack included
    wgmma: int  # instructions of each kind in the PTX
    mma: int
    cubin: bytes


# bytes of shared memory that a program may have: a kernel that wants more compiles and does not launch
SHARED = {80: 166912, 89: 101376, 90: 232448}


def compile_case(case: Case, arch: int) -> Compiled:
    """`arch` 90 is sm_90. Raises what the compiler raises, and MemoryError for more shared memory than there is."""
    names = case.kernel.arg_names
    constexprs = {name: value for name, value in case.constexprs.items() if name in names}
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    # what a launch knows of its arguments: tensors start at multiples of 16 bytes, and so do the strides of theirs
    attrs = {(i,): [["tt.divisibility", 16]] for i, param in enumerate(case.kernel.params) if _aligned(param, signature)}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(case.options))
    usage, ptx = _usage(made.asm["cubin"]), made.asm["ptx"]
    if made.metadata.shared > SHARED[arch]:
        raise MemoryError(f"wants {made.metadata.shared} bytes of shared memory, sm_{arch} has {SHARED[arch]}")
    return Compiled(
        case.kernel.__name__,
        usage["REG"],
        made.metadata.shared,
        usage["STACK"] + usage["LOCAL"],
        ptx.count("wgmma.mma_async"),
        ptx.count("mma.sync"),
        made.asm["cubin"],
    )


def _aligned(param: KernelParam, signature: dict[str, str]) -> bool:
    kind = signature[param.name]
    if kind.startswith("*"):
        return not param.do_not_specialize_on_alignment
    return kind in ("i32", "i64") and not (param.do_not_specialize or param.do_not_specialize_on_alignment)


def _usage(cubin: bytes) -> dict[str, int]:
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _output(cubin, "cuobjdump", "-res-usage")))
    return {name: int(found.get(name, 0)) for name in ("REG", "STACK", "LOCAL")}


def disassembled(cubin: bytes) -> str | None:
    """nvdisasm's text; None where Triton came without it."""
    return _output(cubin, "nvdisasm", "-c") if (TOOLS / "nvdisasm").exists() else None


def _output(cubin: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def versions(arch: int = 90) -> dict[str, str]:
    """Of Triton, of the assembler that it calls for `arch`, and of the disassembler beside it."""
    tool = triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas
    known = {"triton": triton.__version__, "ptxas": _release(tool.path), "ptxas path": tool.path}
    disassembler = TOOLS / "nvdisasm"
    return known | {"nvdisasm": _release(disassembler) if disassembler.exists() else "missing: wgmma's operands go unchecked"}


def _release(tool: str | Path) -> str:
    release = re.search(r"V([\d.]+)", subprocess.run([tool, "--version"], capture_output=True, text=True).stdout)
    return release[1] if release else "unknown"
