"""Triton's interpreter, without what it does again at every step of a kernel: the same numbers in a quarter of the time.

It stands in for functions of Triton's own, so only in the release that it was written for; another interprets kernels as it does.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from unittest import mock

import triton
from triton import language as tl
from triton.runtime import interpreter

RELEASE = "3.6."


@contextlib.contextmanager
def hastened() -> Iterator[None]:
    """Sums of integers are not checked for overflow here: small shapes have no large offsets."""
    if not triton.__version__.startswith(RELEASE):
        yield
        return
    builder = interpreter.interpreter_builder
    with (
        mock.patch.object(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)),
        mock.patch.object(interpreter, "_patch_lang", _by_the_kernel_alone(interpreter._patch_lang)),
        mock.patch.object(interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype)),
        mock.patch.object(tl.tensor, "__init__", _tensor),
        mock.patch.object(tl.block_type, "__init__", _block(tl.block_type.__init__)),
        mock.patch.object(tl.core, "_type_for_tuple_values", lambda values, fields=None: None),  # compilation asks for it
    ):
        yield


class _Everything:
    """In place of a function: all modules of whose operations the interpreter makes its own."""

    __globals__ = {"language": tl, "core": tl.core}  # noqa: RUF012


class _Done:
    """What a function does that a kernel calls: the kernel has replaced the operations, and puts them back."""

    @staticmethod
    def restore() -> None:
        pass


def _by_the_kernel_alone(patch: Callable) -> Callable:
    running = []

    def patch_lang(function: Callable) -> object:
        if running:
            return _Done
        scope = patch(_Everything)
        restore = scope.restore
        scope.restore = lambda: (running.clear(), restore())
        running.append(scope)
        return scope

    return patch_lang


def _kept_by_name(find: Callable) -> Callable:
    kept = {}

    def get(dtype: tl.dtype) -> object:
        if dtype.name not in kept:
            kept[dtype.name] = find(dtype)
        return kept[dtype.name]

    return get


def _block(make: Callable) -> Callable:
    kept = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Iterable) -> None:
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in kept:
            make(self, element_ty, shape)
            kept[key] = vars(self).copy()
        vars(self).update(kept[key])

    return init


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape) if type.is_block() else ())
