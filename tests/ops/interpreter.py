"""Triton's interpreter, without what it does again at every step of a kernel: the same numbers in an eighth of the time.

It stands in for functions of Triton's own, so only in the release that it was written for; another interprets kernels as it does.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from unittest import mock

import numpy as np
import triton
from triton import language as tl
from triton.language.semantic import TritonSemantic
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
        mock.patch.object(interpreter, "_patch_attr", _patch_attr),
        mock.patch.object(interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype)),
        mock.patch.object(TritonSemantic, "broadcast_impl_value", _broadcast),
        mock.patch.object(TritonSemantic, "cast", _cast(TritonSemantic.cast)),
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


def _by_the_kernel_alone(patch: Callable) -> Callable:
    running = []

    def patch_lang(function: Callable) -> object:
        if running:
            return _Done
        scope = patch(_Everything)
        for name, operator in list(_operators()):
            scope.set_attr(tl.tensor, name, operator)
        scope.set_attr(tl, "arange", _arange)
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


FLOATS = {"fp32": np.float32, "fp64": np.float64}
INTEGERS = {"int32": np.int32, "int64": np.int64}
NUMBERS = FLOATS | INTEGERS


def _operators() -> Iterator[tuple[str, Callable]]:
    """Tensors' own operators, where numbers are of one type or integers; what else they are given they leave to Triton's."""
    triton_s = lambda name: getattr(tl.tensor, name)
    for name, function in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        forward, reverse = f"__{name}__", f"__r{name}__"
        yield forward, _operator(_offset(triton_s(forward)) if name == "add" else triton_s(forward), function, NUMBERS)
        yield reverse, _operator(triton_s(reverse), lambda x, y, f=function: f(y, x), NUMBERS)
    for name, function in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}.items():
        yield f"__{name}__", _operator(triton_s(f"__{name}__"), function, NUMBERS, compares=True)
    yield "__eq__", _operator(triton_s("__eq__"), np.equal, NUMBERS, compares=True)
    yield "__truediv__", _operator(triton_s("__truediv__"), np.divide, FLOATS)
    yield "__floordiv__", _operator(triton_s("__floordiv__"), lambda x, y: (x - np.fmod(x, y)) // y, INTEGERS)
    yield "__mod__", _operator(triton_s("__mod__"), np.fmod, INTEGERS)
    yield "__and__", _operator(triton_s("__and__"), np.bitwise_and, {"int1": np.bool_})
    yield "__getitem__", _new_axes(triton_s("__getitem__"))


def _operator(plain: Callable, function: Callable, kinds: dict[str, type], compares: bool = False) -> Callable:
    def run(x: tl.tensor, y: object) -> tl.tensor:
        kind = x.dtype
        if kind.name not in kinds:
            return plain(x, y)
        if type(y) is tl.tensor:
            if y.dtype.name != kind.name:
                if y.dtype.name not in kinds or kind.name in FLOATS or y.dtype.name in FLOATS:
                    return plain(x, y)
                kind = tl.int64
            other, shaped = y.handle.data, _joint(x.type, y.type)
        else:
            other, shaped = _constant(y, kind.name, compares), x.type
            if other is None:
                return plain(x, y)
        data = function(x.handle.data, other)
        return _new(data, tl.int1 if compares else kind, shaped)

    return run


def _offset(plain: Callable) -> Callable:
    """Pointers plus integers."""

    def add(x: tl.tensor, y: object) -> tl.tensor:
        if type(x.dtype) is not tl.pointer_type:
            return plain(x, y)
        if type(y) is tl.tensor and y.dtype.name in INTEGERS:
            other, shaped = y.handle.data, _joint(x.type, y.type)
        else:
            other, shaped = _constant(y, "int32", False), x.type
            if other is None:
                return plain(x, y)
        bytes_each = max(1, x.dtype.element_ty.primitive_bitwidth // 8)
        return _new(x.handle.data + bytes_each * other.astype(np.uint64), x.dtype, shaped)

    return add


def _new_axes(plain: Callable) -> Callable:
    def getitem(x: tl.tensor, index: object) -> tl.tensor:
        if type(index) is not tuple or not x.type.is_block() or not all(i is None or i == slice(None) for i in index):
            return plain(x, index)
        return _new(x.handle.data[index], x.dtype, None)

    return getitem


def _joint(x: tl.dtype, y: tl.dtype) -> tl.dtype | None:
    """A type of the shape that two have together, None where neither has it."""
    if type(x) is not tl.block_type:
        return y
    return x if type(y) is not tl.block_type or x.shape is y.shape else None


def _new(data: np.ndarray, kind: tl.dtype, shaped: tl.dtype | None) -> tl.tensor:
    """shaped: a type of data's shape; None for that of a block."""
    if shaped is None or (type(shaped) is tl.block_type and shaped.element_ty is not kind):
        shaped = _block_of(kind, data.shape)
    elif type(shaped) is not tl.block_type:
        shaped = kind
    return tl.tensor(interpreter.TensorHandle(data, kind), shaped)


_blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


def _block_of(kind: tl.dtype, sizes: tuple[int, ...]) -> tl.block_type:
    key = kind.name, sizes
    if key not in _blocks:
        _blocks[key] = tl.block_type(kind, list(sizes))
    return _blocks[key]


def _broadcast(self: TritonSemantic, x: tl.tensor, y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if _joint(x.type, y.type) is None or (type(x.type) is tl.block_type) != (type(y.type) is tl.block_type):
        shape = np.broadcast_shapes(x.handle.data.shape, y.handle.data.shape)
        x, y = (_of_shape(z, shape) for z in (x, y))
    return x, y


def _of_shape(x: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    if type(x.type) is tl.block_type and x.handle.data.shape == shape:
        return x
    return _new(np.broadcast_to(x.handle.data, shape), x.dtype, None)


def _cast(plain: Callable) -> Callable:
    def cast(self: TritonSemantic, x: tl.tensor, to: tl.dtype, *rounding: object) -> tl.tensor:
        return x if x.dtype is to else plain(self, x, to, *rounding)

    return cast


def _arange(start: int, end: int) -> tl.tensor:
    return _new(np.arange(start, end, dtype=np.int32), tl.int32, None)


@cache
def _number(x: float, kind: str, compares: bool) -> np.ndarray | None:
    if kind in INTEGERS:
        return np.array([x], INTEGERS[kind]) if -(2**31) <= x < 2**31 else None
    # a number that is compared is a float32 first
    given = np.array([x], np.float32) if compares else x
    return np.array([x] if given is x else given, FLOATS[kind])


def _constant(x: object, kind: str, compares: bool) -> np.ndarray | None:
    """A number as an operator takes it beside tensors of this kind; None for what Triton's is left with."""
    if type(x) is not int and (type(x) is not float or kind not in FLOATS):
        return None
    return None if kind not in NUMBERS else _number(x, kind, compares)
