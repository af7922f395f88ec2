"""Launches whose cost on the host counts most: several for every content chunk of a call, alike but for a few arguments.

A kernel's C function is found, its descriptors are encoded and its arguments laid out once (`common/triton_launch.py`); then it is
called with what changed.
"""

from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.common.together import run
from needlework.ops.common.triton_launch import c_function

VARIES = object()  # in the place of an argument: given at each launch


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
    direct = c_function(compiled)
    if direct is None:
        given, call = list(args), compiled[grid]
    else:
        call, blocks = direct
        launcher, encodings = compiled.run, iter(blocks)
        stream = driver.active.get_current_stream(driver.active.get_current_device())
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
