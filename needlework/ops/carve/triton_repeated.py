"""Launches whose cost on the host counts: several for every content chunk of a call.

Triton looks a kernel up, checks every pointer and encodes every descriptor again at each launch, which takes longer than many
of these kernels run. Here all of that is done once, and its C function is called with what changed.
"""

from inspect import signature

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.together import run

VARIES = object()  # in the place of an argument: given at each launch
# the Triton known here: another one launches as it does itself
KNOWN = getattr(nvidia, "_BASE_ARGS_FORMAT", None) == "iiiKKppOOOOOO" and list(
    signature(nvidia.make_tensordesc_arg).parameters
) == ["arg", "metadata"]


class Repeated:
    """A kernel launched again and again on the current stream; pointers are always as aligned as at the first launch.

    What is given here is kept: launches know but its address.
    """

    def __init__(self, kernel, grid: tuple[int, int, int], constants: dict, *args):
        self.kernel, self.grid, self.constants, self.args = kernel, grid, constants, args
        self.places = [i for i, x in enumerate(args) if x is VARIES]
        self.launch = None

    def __call__(self, *varied) -> None:
        if self.launch is not None:
            self.launch(*varied)
            return
        args = list(self.args)
        for i, x in zip(self.places, varied, strict=True):
            args[i] = x
        compiled = run(self.kernel, self.grid, *args, **self.constants)
        if compiled is not None:  # as the interpreter's is, and a rehearsal's
            args += [self.constants[name] for name in self.kernel.arg_names[len(args) :]]
            self.launch = _bound(compiled, self.grid, args, self.places)


def _bound(compiled, grid: tuple[int, int, int], args: list, places: list[int]):
    """compiled[grid] as a function of the arguments at `places`, on the stream that is now current."""
    device = driver.active.get_current_device()
    stream, direct = driver.active.get_current_stream(device), _direct(compiled)
    if direct is None:
        given, call = list(args), compiled[grid]
    else:
        call, blocks = direct
        launcher, encodings = compiled.run, iter(blocks)
        given = [*grid, stream, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl]
        given += [None, None, compiled.packed_metadata, None, None, None]  # no scratch, nobody listens
        moved = []
        for x in args:
            moved.append(len(given))
            given += nvidia.make_tensordesc_arg(x, next(encodings, None)) if isinstance(x, TensorDescriptor) else [_address(x)]
        places = [moved[i] for i in places]

    def launch(*varied) -> None:
        for i, x in zip(places, varied, strict=True):
            given[i] = x
        call(*given)

    return launch


def _address(x):
    """A tensor as the number that stands for it."""
    return x.data_ptr() if hasattr(x, "data_ptr") else x


def _direct(compiled):
    """The C function that launches a kernel, and the blocks of its descriptors; None where it is not to be called directly."""
    launcher = compiled.run
    if not KNOWN or type(launcher) is not nvidia.CudaLauncher:
        return None
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch = launcher.launch
    if not hasattr(launch, "__closure__"):  # no descriptor: the C function itself
        return launch, ()
    inside = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True))
    return (inside["launcher"], inside["tensordesc_meta"]) if {"launcher", "tensordesc_meta"} <= inside.keys() else None
