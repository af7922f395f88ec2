"""Launches whose cost on the host counts most: several for every content chunk of a call, alike but for a few arguments.

A kernel's C function is found, its descriptors are encoded and its arguments laid out once (`ops/runtime/launcher.py`); later
launches pass what changed. When addresses repeat, as they do from one training step to the next, the launches are replayed as a
CUDA graph.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.runtime.launch_configs import Constants, interpreted
from needlework.ops.runtime.launcher import c_function, encode
from needlework.ops.runtime.precompile import precompiling, run

GRAPHS = 128  # kept: forward and backward of as many layers as half of them
_graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
_seen: OrderedDict[Hashable, None] = OrderedDict()

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
        if self.launch is not None:
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
    """walk(), which launches those alone, with numbers that follow from them and parts of `varied` where their arguments vary.

    The second time that everything lies in the same place the launches are captured, and after that replayed: on the device
    nothing differs, on the host one launch takes the place of hundreds.
    """
    device = varied[0].device
    if interpreted() or precompiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return walk()
    key = *(launch.place() for launch in launches), *map(_place, varied)
    if key not in _graphs:
        if key not in _seen:
            _remember(_seen, key, None)
            return walk()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                walk()
            finally:
                graph.capture_end()
        _remember(_graphs, key, graph)
    _graphs.move_to_end(key)
    _graphs[key].replay()


def _remember(kept: OrderedDict, key: Hashable, x: object) -> None:
    if len(kept) >= GRAPHS:
        kept.popitem(last=False)
    kept[key] = x


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
