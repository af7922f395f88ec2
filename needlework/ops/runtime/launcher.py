"""Launches that cost the host little. The first launch of a kernel with arguments of one kind is Triton's own; later ones call the
C function that Triton made for it.

Triton looks at every argument, checks every pointer and encodes every descriptor again at each launch, which takes longer than
many of these kernels run. The C function takes addresses, and descriptors of the same memory are encoded once.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

# What the C function reads: a kernel's own takes its arguments one by one (Triton 3.6), or one for all kernels takes them as a list,
# after what they are (3.7 to 3.9). Another Triton launches as it does itself.
ONE_BY_ONE, AS_LIST = "iiiKKppOOOOOO", "iiiKKpp(iii)OOOOOOy*O"


def read_by(module: ModuleType) -> str | None:
    """Which of the two the C function of Triton's driver module reads; None of a Triton that is not known here."""
    encodes = getattr(module, "make_tensordesc_arg", None)
    if encodes is None or list(signature(encodes).parameters) not in (["arg", "metadata"], ["arg", "metadata", "_"]):
        return None
    if hasattr(module, "_BASE_ARGS_FORMAT"):
        return ONE_BY_ONE if module._BASE_ARGS_FORMAT == ONE_BY_ONE else None
    assert module.__file__ is not None
    source = Path(module.__file__).with_name("driver.c")
    return AS_LIST if source.is_file() and f'"{AS_LIST}"' in source.read_text() else None


FORMAT = read_by(nvidia)
ENCODED = 256  # descriptors remembered of one argument
_direct: dict[Hashable, "Direct | None"] = {}


class Listener(Protocol):
    """Who is told of launches."""

    def launched(self, direct: "Direct | None", grid: tuple[int, ...], arguments: tuple) -> None:
        """The C function, None where there is none, its grid and arguments."""

    def together(self) -> AbstractContextManager[None]:
        """Launches until its end are one chain: what else is done meanwhile finds parts of tensors that were there before."""


told: ContextVar[Listener | None] = ContextVar("who is told of launches", default=None)


def launch(kernel: JITFunction, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> CompiledKernel | None:
    """kernel[grid](*arguments, **constants); the compiled kernel, None of one that is not compiled. RuntimeError, which names the kernel,
    where it wants more memory on chip than this GPU has."""
    kind = None
    if calls_directly() and type(kernel) is JITFunction:
        kind, given = _kind(kernel, arguments, constants)
        direct = _direct.get(kind)
        if direct is not None:
            direct(grid, given)
            _tell(direct, grid, arguments)
            return direct.compiled
    enter_context()
    try:
        compiled = kernel[grid](*arguments, **constants)
    except OutOfResources as error:
        raise RuntimeError(
            f"{kernel.__name__} wants {error.required:,} of {error.name}, this GPU has {error.limit:,}"
        ) from error
    if kind is not None and kind not in _direct:
        _direct[kind] = Direct.of(compiled, arguments, constants)
    _tell(_direct.get(kind), grid, arguments)
    return compiled


def _tell(direct: "Direct | None", grid: tuple[int, ...], arguments: tuple) -> None:
    listener = told.get()
    if listener is not None:
        listener.launched(direct, grid, arguments)


def calls_directly() -> bool:
    """Whether later launches are the C function's: a launch hook is called by Triton's own alone."""
    return FORMAT is not None and not _hooked()


def _hooked() -> bool:
    """Whether a launch hook is set: only Triton's own launch calls it."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _kind(kernel: JITFunction, arguments: tuple, constants: dict[str, Any]) -> tuple[Hashable, list]:
    """What a kernel is compiled for, None where this is not for the C function; arguments as that takes them."""
    facts, given, low = [kernel, driver.active.get_current_device(), *constants, *constants.values()], [], 0
    for x in arguments:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            low |= address
            facts.append(x.dtype)
            given.append(address)
            continue
        given.append(x)
        kind = type(x)
        if kind is int:
            facts.append(x >> 31)  # 32 or 64 bits
        elif kind is TensorDescriptor:
            facts += x.base.dtype, *x.block_shape
        elif kind is float or x is None:
            facts.append(kind)
        else:
            return None, given
    # a pointer that is not to a multiple of 16 bytes has a kernel of its own
    return None if low & 15 else tuple(facts), given


class Direct:
    """A compiled kernel's C function."""

    def __init__(self, compiled: CompiledKernel, call: Callable, blocks: list[dict], arguments: tuple, after: list):
        self.compiled, self.call, self.after = compiled, call, after
        places = [i for i, x in enumerate(arguments) if isinstance(x, TensorDescriptor)]
        # from the last, so that places stay right while one takes the room of many
        self.descriptors = list(zip(reversed(places), reversed(blocks), ({} for _ in places), strict=True))

    @classmethod
    def of(cls, compiled: CompiledKernel, arguments: tuple, constants: dict[str, Any]) -> "Direct | None":
        """None where it is not to be called directly."""
        found = c_function(compiled)
        if found is None:
            return None
        kernel = compiled.src.fn
        for x, param in zip(arguments, kernel.params, strict=False):
            if type(x) is int and not (param.is_constexpr or param.do_not_specialize):
                return None
        after = kernel.arg_names[len(arguments) :]
        if not constants.keys() >= set(after):  # one is left at its default
            return None
        return cls(compiled, *found, arguments, [constants[name] for name in after])

    def __call__(self, grid: tuple[int, ...], given: list) -> None:
        for i, block, encoded in self.descriptors:
            x = given[i]
            key = x.base.data_ptr(), *x.shape, *x.strides
            if key not in encoded:
                if len(encoded) >= ENCODED:
                    encoded.clear()
                encoded[key] = encode(x, block)
            given[i : i + 1] = encoded[key]
        self.start(in_three(grid), current_stream(), given)

    def start(self, grid: tuple[int, ...], stream: int, given: list) -> None:
        """Launch with descriptors encoded."""
        self.call(grid, stream, given + self.after)


def current_stream() -> int:
    return driver.active.get_current_stream(driver.active.get_current_device())


def in_three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, *(1,) * (3 - len(grid)))


def enter_context() -> None:
    """CUDA encodes a descriptor in a thread that has a context. A thread gets one with its first call of the runtime, which neither Triton's
    encoder nor PyTorch's allocator makes: autograd's has none where a backward pass begins with a kernel of ours. This call is such a one,
    and allowed in a capture."""
    if torch.cuda.is_initialized():  # the interpreter needs none
        torch.cuda.is_current_stream_capturing()


def encode(descriptor: TensorDescriptor, block: dict | None) -> list:
    """A descriptor as the C function takes it."""
    enter_context()
    given = descriptor, block, None  # Triton 3.8 and later take the last and do not read it
    return nvidia.make_tensordesc_arg(*given[: nvidia.make_tensordesc_arg.__code__.co_argcount])


def c_function(compiled: CompiledKernel) -> tuple[Callable, list] | None:
    """What launches a compiled kernel, called with three sizes of a grid, a stream and a list of arguments, and the blocks of its
    descriptors; None where it is not to be called directly."""
    launcher = getattr(compiled, "run", None)
    if not FORMAT or type(launcher) is not nvidia.CudaLauncher or _hooked():
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None
    function, blocks = launcher.launch, []
    if hasattr(function, "__closure__"):  # else no descriptor: the C function itself
        names = function.__code__.co_freevars
        inside = dict(zip(names, (cell.cell_contents for cell in function.__closure__), strict=True))
        if not {"launcher", "tensordesc_meta"} <= inside.keys():
            return None
        function, blocks = inside["launcher"], inside["tensordesc_meta"]
    # no scratch, no hooks
    facts = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    if FORMAT == ONE_BY_ONE:
        facts += None, None, compiled.packed_metadata, None, None, None
        return lambda grid, stream, given: function(*grid, stream, *facts, *given), blocks
    facts += compiled.packed_metadata, *(None,) * 5, launcher.arg_annotations, launcher.kernel_signature
    return lambda grid, stream, given: function(*grid, stream, *facts, given), blocks
