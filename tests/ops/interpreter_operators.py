"""Operations of Triton's interpreter on tensors whose types say at once what is to be done; Triton's own do the rest.

Triton finds the types of a result, of each operand's cast and of its broadcast anew for every operation. numpy broadcasts as it does.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

FLOATS = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
INTEGERS = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
NUMBERS = FLOATS | INTEGERS
STORED = NUMBERS | {"fp16": np.dtype(np.float16)}


def operators() -> Iterator[tuple[str, Callable]]:
    """Of tensors, where numbers are of one type or integers."""
    tritons = lambda name: getattr(tl.tensor, name)
    for name, function in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        forward, reverse = f"__{name}__", f"__r{name}__"
        yield forward, _operator(_offset(tritons(forward)) if name == "add" else tritons(forward), function, NUMBERS)
        yield reverse, _operator(tritons(reverse), lambda x, y, f=function: f(y, x), NUMBERS)
    for name, function in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}.items():
        yield f"__{name}__", _operator(tritons(f"__{name}__"), function, NUMBERS, compares=True)
    yield "__eq__", _operator(tritons("__eq__"), np.equal, NUMBERS, compares=True)
    yield "__truediv__", _operator(tritons("__truediv__"), np.divide, FLOATS)
    yield "__floordiv__", _operator(tritons("__floordiv__"), lambda x, y: (x - np.fmod(x, y)) // y, INTEGERS)
    yield "__mod__", _operator(tritons("__mod__"), np.fmod, INTEGERS)
    yield "__rshift__", _operator(tritons("__rshift__"), np.right_shift, INTEGERS)
    yield "__and__", _operator(tritons("__and__"), np.bitwise_and, {"int1": np.dtype(bool)})
    yield "__getitem__", _new_axes(tritons("__getitem__"))
    yield "__index__", lambda x: x.handle.data.item()  # int() of an array warns


def functions() -> Iterator[tuple[str, Callable]]:
    """Of the language."""
    # a size of a tensor's shape is a constexpr
    yield "arange", lambda start, end: _new(np.arange(start, getattr(end, "value", end), dtype=np.int32), tl.int32, None)
    yield "where", _where(tl.where)
    yield "load", _load(tl.load)
    yield "store", _store(tl.store)
    for name, function in {"maximum": np.maximum, "minimum": np.minimum}.items():
        yield name, _extremum(getattr(tl, name), function)


def _operator(plain: Callable, function: Callable, kinds: dict[str, np.dtype], compares: bool = False) -> Callable:
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
        return _new(function(x.handle.data, other), tl.int1 if compares else kind, shaped)

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
        if (
            type(index) is not tuple
            or type(x.type) is not tl.block_type
            or not all(i is None or i == slice(None) for i in index)
        ):
            return plain(x, index)
        return _new(x.handle.data[index], x.dtype, None)

    return getitem


def _extremum(plain: Callable, function: Callable) -> Callable:
    run = _operator(plain, function, NUMBERS)

    def extremum(x: object, y: object, **more: object) -> tl.tensor:
        if more:
            return plain(x, y, **more)
        return run(x, y) if type(x) is tl.tensor else run(y, x) if type(y) is tl.tensor else plain(x, y)

    return extremum


def _where(plain: Callable) -> Callable:
    def where(condition: object, x: object, y: object) -> tl.tensor:
        kind = x.dtype if type(x) is tl.tensor else y.dtype if type(y) is tl.tensor else None
        if kind is None or kind.name not in NUMBERS or type(condition) is not tl.tensor or condition.dtype is not tl.int1:
            return plain(condition, x, y)
        datas, shaped = [], [condition.type]
        for z in (x, y):
            if type(z) is tl.tensor:
                data = z.handle.data if z.dtype is kind else None
                shaped.append(z.type)
            else:
                data = _constant(z, kind.name, False)
            if data is None:
                return plain(condition, x, y)
            datas.append(data)
        scalar = all(type(one) is not tl.block_type for one in shaped)
        return _new(np.where(condition.handle.data, *datas), kind, kind if scalar else None)

    return where


def _load(plain: Callable) -> Callable:
    def load(pointer: tl.tensor, mask: object = None, other: object = None, **more: object) -> tl.tensor:
        kind = pointer.dtype.element_ty if type(pointer.dtype) is tl.pointer_type else None
        if kind is None or kind.name not in STORED or more or (mask is None) != (other is None):
            return plain(pointer, mask, other, **more)
        shape = pointer.handle.data.shape
        if mask is None:
            mask, other = np.ones(shape, bool), 0
        elif type(mask) is not tl.tensor or mask.dtype is not tl.int1 or type(other) not in (int, float):
            return plain(pointer, mask, other)
        else:
            mask = mask.handle.data
            if mask.shape != shape and np.broadcast_shapes(mask.shape, shape) != shape:
                return plain(pointer, mask, other)
            mask = np.broadcast_to(mask, shape)
        to = STORED[kind.name]
        # a number is a float32 first
        left_out = np.full(shape, np.float32(other), to)
        return _new(interpreter._interpreter.load(pointer.handle.data, mask, left_out, to), kind, pointer.type)

    return load


def _store(plain: Callable) -> Callable:
    def store(pointer: tl.tensor, value: object, mask: object = None, **more: object) -> object:
        kind = pointer.dtype.element_ty if type(pointer.dtype) is tl.pointer_type else None
        shape = pointer.handle.data.shape
        masked = type(mask) is tl.tensor and mask.dtype is tl.int1
        if kind is None or kind.name not in STORED or more or not (masked or mask is None) or type(value) is not tl.tensor:
            return plain(pointer, value, mask, **more)
        if value.dtype.name not in STORED or any(z.handle.data.ndim > len(shape) for z in (value, *([mask] if masked else []))):
            return plain(pointer, value, mask)
        mask = np.broadcast_to(mask.handle.data if masked else True, shape)
        data = np.broadcast_to(value.handle.data.astype(STORED[kind.name], copy=False), shape)
        return interpreter._interpreter.store(pointer.handle.data, data, mask)

    return store


def broadcast(self: TritonSemantic, x: tl.tensor, y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if _joint(x.type, y.type) is None or (type(x.type) is tl.block_type) != (type(y.type) is tl.block_type):
        shape = np.broadcast_shapes(x.handle.data.shape, y.handle.data.shape)
        x, y = (_of_shape(z, shape) for z in (x, y))
    return x, y


def _of_shape(x: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    if type(x.type) is tl.block_type and x.handle.data.shape == shape:
        return x
    return _new(np.broadcast_to(x.handle.data, shape), x.dtype, None)


@cache
def casts(plain: Callable) -> Callable:
    def cast(self: TritonSemantic, x: tl.tensor, to: tl.dtype, *rounding: object) -> tl.tensor:
        kind = to.scalar
        if x.dtype is kind:
            return x
        if kind.name not in STORED or not (x.dtype.name in STORED or x.dtype is tl.int1) or any(rounding):
            return plain(self, x, to, *rounding)
        return _new(x.handle.data.astype(STORED[kind.name]), kind, x.type)

    return cast


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


@cache
def _number(x: float, kind: str, compares: bool) -> np.ndarray | None:
    if kind in INTEGERS:
        return np.array([x], INTEGERS[kind]) if -(2**31) <= x < 2**31 else None
    # Triton's null is 0, not −0; and a number that is compared is a float32 first
    return np.array([np.float32(x) if compares else x or 0], FLOATS[kind])


def _constant(x: object, kind: str, compares: bool) -> np.ndarray | None:
    """A number as an operator takes it beside tensors of this kind; None for what Triton's is left with."""
    if type(x) is not int and (type(x) is not float or kind not in FLOATS):
        return None
    return None if kind not in NUMBERS else _number(x, kind, compares)
