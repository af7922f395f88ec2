"""What a kernel becomes, found without a GPU: registers, shared memory, spills, and which tools made it."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from needlework.ops.common.launch import Case

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    kernel: str
    registers: int
    shared: int  # bytes
    spilled: int  # bytes a thread, stack included
    wgmma: bool


def compile_case(case: Case, arch: int) -> Compiled:
    """`arch` 90 is sm_90. Raises what the compiler raises."""
    names = case.kernel.arg_names
    constexprs = {name: value for name, value in case.constexprs.items() if name in names}
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    # what the launcher knows of real tensors: their bases are multiples of 16 bytes
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(case.options))
    usage = _usage(made.asm["cubin"])
    return Compiled(
        case.kernel.__name__,
        usage["REG"],
        made.metadata.shared,
        usage["STACK"] + usage["LOCAL"],
        "wgmma.mma_async" in made.asm["ptx"],
    )


def _usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout + told.stderr))
    return {name: int(found.get(name, 0)) for name in ("REG", "STACK", "LOCAL")}


def versions() -> dict[str, str]:
    """Of Triton and of the assembler that it calls."""
    ptxas = Path(triton.knobs.nvidia.ptxas.path)
    told = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", told)
    return {"triton": triton.__version__, "ptxas": release[1] if release else "unknown", "ptxas path": str(ptxas)}
