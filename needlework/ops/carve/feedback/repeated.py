"""Launches whose cost on the host counts most: several for every content chunk of a call, alike but for a few arguments.

A kernel's C function is found, its descriptors are encoded and its arguments laid out once (`ops/runtime/launcher.py`); later
launches pass what changed. When addresses repeat, as they do from one training step to the next, the launches are replayed as a
CUDA graph.
"""

from collections.abc import Callable, Hashable

from torch import Tensor
from triton import JITFunction
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.runtime import launcher
from needlework.ops.runtime.launch_configs import Constants
from needlework.ops.runtime.launcher import c_function, encode
from needlework.ops.runtime.precompile import run
from needlework.ops.runtime.replayed import replayed

VARIES = object()  # in the place of an argument: given at each launch


class Repeated:
    """A kernel launched again and again on the current stream; pointers are always as aligned as at the first launch.

    What is given here is kept: launches know but its address.
    """

    def __init__(self, kernel: JITFunction, grid: tuple[int, int, int], constants: Constants, *args: object):
        self.kernel, self.grid, self.constants, self.args = kernel, grid, constants, args
        self.places = [i for i, x in enumerate(args) if x is VARIES]
        self.launch = None

    def place(self) -> Hashable:
        """What is launched, and where everything that is given here lies."""
        return self.kernel, self.grid, *self.constants, *self.constants.values(), *map(_place, self.args)

    def __call__(self, *varied: object) -> None:
        if self.launch is not None and launcher.told.get() is None:
            self.launch(*varied)
            return
        args = list(self.args)
        for i, x in zip(self.places, varied, strict=True):
            args[i] = x
        compiled = run(self.kernel, self.grid, *args, **self.constants)
        if compiled is not None:  # None from the interpreter and while precompiling
            args += [self.constants[name] for name in self.kernel.arg_names[len(args) :]]
            self.launch = _bound(compiled, self.grid, args, self.places)


def launch_all(walk: Callable[[], None], launches: tuple[Repeated, ...], *varied: Tensor) -> None:
    """walk(), which launches those alone, with numbers that follow from them and parts of `varied` where their arguments vary; `replayed`."""
    listener = launcher.told.get()
    if listener is not None:
        with listener.together():
            return walk()
    return replayed(walk, varied[0].device, lambda: (*(launch.place() for launch in launches), *map(_place, varied)))


def _place(x: object) -> Hashable:
    if isinstance(x, Tensor):
        return x.data_ptr(), x.dtype, x.shape
    if isinstance(x, TensorDescriptor):
        return x.base.data_ptr(), x.base.dtype, *x.shape, *x.block_shape
    return x


def _bound(compiled, grid: tuple[int, int, int], args: list, places: list[int]):
    """compiled[grid] as a function of the arguments at `places`, on the stream that is now current."""
    direct = c_function(compiled)
    if direct is None:
        given, call = list(args), compiled[grid]
        start = lambda: call(*given)
    else:
        function, blocks = direct
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        given, moved, encodings = [], [], iter(blocks)
        start = lambda: function(grid, stream, given)
        for x in args:
            moved.append(len(given))
            given += encode(x, next(encodings, None)) if isinstance(x, TensorDescriptor) else [_address(x)]
        places = [moved[i] for i in places]

    def launch(*varied) -> None:
        for i, x in zip(places, varied, strict=True):
            given[i] = x
        start()

    return launch


def _address(x):
    """A tensor's address."""
    return x.data_ptr() if hasattr(x, "data_ptr") else x
