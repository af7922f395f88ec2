"""Every number that a kernel loads, stores or adds to in Triton's interpreter lies in a tensor that it was given, and no two programs of a
launch store different numbers to one place (`stores.py`).

The interpreter takes any address of this process. On a GPU a number outside may be another tensor's, and a mask that is wrong goes unseen where
what is read there is multiplied by zero.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from unittest import mock

import numpy as np
import triton
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from .interpreter import RELEASE
from .stores import Stores


class Bounds:
    """The interpreter's memory, as the kernel that runs may use it."""

    def __init__(self, memory: object):
        self.memory = memory
        self.kernel = ""
        self.begins: list[int] = []  # addresses of its tensors in order, those that overlap as one
        self.ends: list[int] = []
        self.stores = Stores()

    def begin(self, kernel: str, arguments: Iterable[object]) -> None:
        self.kernel, self.begins, self.ends, self.stores = kernel, [], [], Stores()
        for begin, end in sorted(_extents(arguments)):
            if self.ends and begin < self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.begins.append(begin)
                self.ends.append(end)

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: type) -> np.ndarray:
        self._check("loads", addresses, mask, np.dtype(dtype).itemsize)
        return self.memory.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        at = self._check("stores", addresses, mask, values.dtype.itemsize)
        everywhere = np.broadcast_to(values, np.broadcast_shapes(addresses.shape, mask.shape))
        again = self.stores.again(at)
        self._same(at[again], everywhere[np.broadcast_to(mask, everywhere.shape).astype(bool)][again])
        self.memory.store(addresses, values, mask)

    def atomic_rmw(
        self, operation: object, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, order: object
    ) -> np.ndarray:
        self._check("changes", addresses, mask, values.dtype.itemsize)
        self.stores.atomic()
        return self.memory.atomic_rmw(operation, addresses, values, mask, order)

    def __getattr__(self, name: str) -> object:
        return getattr(self.memory, name)

    def _same(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Of where another program has stored."""
        every = np.ones(len(addresses), bool)
        if self.memory.load(addresses, every, np.zeros_like(values), values.dtype).tobytes() != values.tobytes():
            first, last = int(addresses.min()), int(addresses.max())
            where = self._place(first, last, self._tensor(first))
            raise IndexError(f"{self.kernel} stores where another program has, at {where}")

    def _tensor(self, address: int) -> int:
        """Which it lies in or behind; −1: in front of all."""
        return bisect_right(self.begins, int(address)) - 1

    def _check(self, does: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """Those that are not masked."""
        addresses, mask = np.broadcast_arrays(addresses, mask)
        addresses = addresses[mask.astype(bool)]
        if not addresses.size:
            return addresses
        first, last = int(addresses.min()), int(addresses.max())
        i = self._tensor(first)
        if i < 0 or last + size > self.ends[i]:  # a tile of one tensor lies in it
            raise IndexError(f"{self.kernel} {does} outside of the tensor at whose {self._place(first, last, i)} it looks")
        return addresses

    def _place(self, first: int, last: int, i: int) -> str:
        if i < 0:
            return "front there is none"
        return f"bytes {first - self.begins[i]:,} to {last - self.begins[i]:,} of {self.ends[i] - self.begins[i]:,}"


def _extents(arguments: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Where each tensor begins and ends."""
    for x in arguments:
        if isinstance(x, TensorDescriptor):
            yield from _extents([x.base])
        elif isinstance(x, tuple):
            yield from _extents(x)
        elif isinstance(x, Tensor) and x.numel():
            span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            yield x.data_ptr(), x.data_ptr() + span * x.element_size()


@contextlib.contextmanager
def within_tensors() -> Iterator[None]:
    """Kernels that look elsewhere raise Triton's InterpreterError; in another release than RELEASE, whose functions these are, nobody looks."""
    if not triton.__version__.startswith(RELEASE):
        yield
        return
    bounds, host = Bounds(interpreter._interpreter), interpreter.GridExecutor._init_args_hst

    def arguments(executor: interpreter.GridExecutor, given: tuple, named: dict) -> tuple:
        on_host = host(executor, given, named)
        bounds.begin(executor.fn.__name__, [*on_host[0], *on_host[1].values()])
        return on_host

    with (
        mock.patch.object(interpreter, "_interpreter", bounds),
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", arguments),
    ):
        yield
