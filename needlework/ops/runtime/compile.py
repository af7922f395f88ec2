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
from needlework.ops.runtime.target import Target, for_amd

TENSOR_MEMORY = 512  # columns
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    kernel: str
    registers: int
    shared: int  # bytes
    spilled: int  # bytes a thread, stack included
    wgmma: int  # instructions of each kind: Hopper's products, and those of a warp (AMD's too)
    mma: int
    code: bytes


def compile_case(case: Case, target: Target) -> Compiled:
    """Raises what the compiler raises, and MemoryError for more memory on chip than there is: such a kernel compiles and does not
    launch."""
    names = case.kernel.arg_names
    given, options = (for_amd(x) if target.amd else dict(x) for x in (case.constexprs, case.options))
    constexprs = {name: value for name, value in given.items() if name in names}
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    # what a launch knows of its arguments: tensors start at multiples of 16 bytes, and so do the strides of theirs
    attrs = {(i,): [["tt.divisibility", 16]] for i, param in enumerate(case.kernel.params) if _aligned(param, signature)}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    made = triton.compile(source, target=gpu(target), options=options)
    shared, name = made.metadata.shared, case.kernel.__name__
    if shared > target.shared:
        raise MemoryError(f"{name} wants {shared:,} bytes of shared memory, {target.name} has {target.shared:,}")
    # of Blackwell's: what wants more is assembled to nothing
    if (columns := getattr(made.metadata, "tmem_size", None) or 0) > TENSOR_MEMORY:
        raise MemoryError(f"{name} wants {columns} columns of tensor memory, {target.name} has {TENSOR_MEMORY}")
    if target.amd:
        text = made.asm["amdgcn"]
        registers, spilled = _usage_of_amd(text)
        return Compiled(name, registers, shared, spilled, 0, text.count("v_mfma"), made.asm["hsaco"])
    usage, ptx = _usage(made.asm["cubin"]), made.asm["ptx"]
    products = ptx.count("wgmma.mma_async"), ptx.count("mma.sync")
    return Compiled(name, usage["REG"], shared, usage["STACK"] + usage["LOCAL"], *products, made.asm["cubin"])


def gpu(target: Target) -> GPUTarget:
    """As Triton names it. Raises ValueError where this Triton compiles nothing for it."""
    if target.amd:
        if "amd" not in triton.backends.backends:
            raise ValueError(f"{target.name}: this Triton has no backend for AMD's GPUs")
        return GPUTarget("hip", target.name, 64)
    return GPUTarget("cuda", 10 * target.arch[0] + target.arch[1], 32)


def _aligned(param: KernelParam, signature: dict[str, str]) -> bool:
    kind = signature[param.name]
    if kind.startswith("*"):
        return not param.do_not_specialize_on_alignment
    return kind in ("i32", "i64") and not (param.do_not_specialize or param.do_not_specialize_on_alignment)


def _usage(cubin: bytes) -> dict[str, int]:
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _output(cubin, "cuobjdump", "-res-usage")))
    return {name: int(found.get(name, 0)) for name in ("REG", "STACK", "LOCAL")}


def _usage_of_amd(text: str) -> tuple[int, int]:
    """Vector registers, and bytes of a thread in memory."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text))
    return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])


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
