"""Triton's interpreter, without what it does again at every step of a kernel: the same numbers in an eighth of the time.

It replaces functions of Triton's own, so only in the release that it was written for; another interprets kernels as it does.
Here is what is kept from step to step; `interpreter_operators.py` has the operations themselves.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from unittest import mock

import triton
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .interpreter_operators import broadcast, casts, functions, operators

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
        mock.patch.object(interpreter, "_patch_attr", _patch_attr),
        mock.patch.object(interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype)),
        mock.patch.object(TritonSemantic, "broadcast_impl_value", broadcast),
        mock.patch.object(TritonSemantic, "cast", casts(TritonSemantic.cast)),
        mock.patch.object(tl.tensor, "__init__", _tensor),
        mock.patch.object(tl.block_type, "__init__", _block(tl.block_type.__init__)),
        mock.patch.object(interpreter.TensorHandle, "__post_init__", lambda self: None),  # whether numbers fit their type
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


_replaced: list[tuple[object, str, object]] = []  # what the first kernel replaced the operations by


def _by_the_kernel_alone(patch: Callable) -> Callable:
    running = []

    def patch_lang(function: Callable) -> object:
        if running:
            return _Done
        scope = interpreter._LangPatchScope() if _replaced else patch(_Everything)
        for owner, name, operation in _replaced:
            scope.set_attr(owner, name, operation)
        if not _replaced:
            for owner, found in ((tl.tensor, operators()), (tl, functions())):
                for name, operation in list(found):
                    scope.set_attr(owner, name, operation)
            _replaced.extend((owner, name, getattr(owner, name)) for owner, name, _ in scope._changes)
        restore = scope.restore
        scope.restore = lambda: (running.clear(), restore())
        running.append(scope)
        return scope

    return patch_lang


def _patch_attr(owner: object, name: str, member: Callable, builder: object, scope: object) -> None:
    function = getattr(member, "__wrapped__", member)

    def call(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


@cache
def _kept_by_name(find: Callable) -> Callable:
    kept = {}

    def get(dtype: tl.dtype) -> object:
        if dtype.name not in kept:
            kept[dtype.name] = find(dtype)
        return kept[dtype.name]

    return get


@cache
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


def _tensor(self: tl.tensor, handle: object, kind: tl.dtype) -> None:
    self.handle, self.type = handle, kind
    if type(kind) is tl.block_type:
        self.dtype = kind.element_ty
        if not hasattr(kind, "sizes"):
            kind.sizes = _shape(tuple(kind.shape))
        self.shape, self.numel = kind.sizes
    else:
        self.dtype = kind
        self.shape, self.numel = _shape(())
