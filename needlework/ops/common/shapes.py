"""Argument checks that every op makes: each error names the argument, what was passed and what was expected. And the dtype it computes
in."""

import torch
from torch import Tensor
from torch.nn import functional as F

from needlework.ops.runtime.each import Ts, each


def check_tensor(name: str, x: object, axes: str) -> None:
    """Raise ValueError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor [{axes}], got {given(x)}")


def check(name: str, x: Tensor, axes: str, **sizes: int) -> None:
    """Raise ValueError unless x is a tensor with the axes of `axes` ("B T H K") and the sizes that are given.

    Axes not in `sizes` may have any size.
    """
    check_tensor(name, x, axes)
    letters, shape = axes.split(), x.shape  # asked for once: PyTorch makes it anew each time
    if len(shape) != len(letters):
        raise ValueError(f"{name}: expected {len(letters)} axes [{axes}], got shape {list(shape)}")
    for axis, letter in enumerate(letters):
        if letter in sizes and shape[axis] != sizes[letter]:
            raise ValueError(f"{name}: axis {axis} ({letter}) of [{axes}] has size {shape[axis]}, expected {sizes[letter]}")


def check_dtypes(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors share one floating dtype (q, k, v: a mixture is a forgotten cast)."""
    for name, x in tensors.items():
        if x is not None:
            check_tensor(name, x, "…")
    dtypes = {name: x.dtype for name, x in tensors.items() if x is not None}
    if len(set(dtypes.values())) > 1:
        raise ValueError("mixed dtypes: " + ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items()))
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point:
            raise ValueError(f"{name}: expected a floating dtype, got {dtype}")


def check_groups(H: int, HV: int) -> None:
    """Raise ValueError unless the key heads divide the value heads."""
    if HV % H:
        raise ValueError(f"v: axis 2 (HV) has size {HV}, expected a multiple of the {H} key heads of k")


def check_count(name: str, x: int, what: str = "") -> None:
    """Raise ValueError unless x is an integer of at least 1; `what` says what the first one is."""
    if not isinstance(x, int | torch.SymInt):
        raise ValueError(f"{name}: expected an integer, at least 1{what}, got {given(x)}")
    if x < 1:
        raise ValueError(f"{name}: expected at least 1{what}, got {x}")


def check_state(name: str, state: object, kind: type) -> None:
    """Raise ValueError unless the state is the op's NamedTuple of tensors, of which those that are None by default may be None."""
    if not isinstance(state, kind):
        raise ValueError(f"{name}: expected a {kind.__name__}, got {given(state)}")
    for field, x in zip(kind._fields, state, strict=True):
        if x is not None or field not in kind._field_defaults:
            check_tensor(f"{name}.{field}", x, "N …")


def check_slots(slots: Tensor | None, size: int, axis: str = "B") -> None:
    """Raise ValueError unless slots, where there are any, are integers, one for each row (B) or sequence (N)."""
    if slots is not None:
        check("slots", slots, axis, **{axis: size})
        if slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"slots: expected int64, got {slots.dtype}")


def now(names: str, *tokens: *Ts) -> tuple[*Ts]:
    """One token's tensors [B ...] as [B 1 ...], None as it is; ValueError for what is neither. names: "q k v"."""
    for name, x in zip(names.split(), tokens, strict=True):
        if x is None or (isinstance(x, Tensor) and x.dim()):
            continue
        check_tensor(name, x, "B …")
        raise ValueError(f"{name}: expected axes [B …], got shape []")
    return each(lambda x: x.unsqueeze(1), *tokens)


def given(x: object) -> str:
    """What was passed in place of something else, in a few words."""
    if x is None:
        return "None"
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) < 50 else text[:47] + '...'}"


def width(q: Tensor) -> torch.dtype:
    """The dtype that an op on q computes in."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def behind(x: Tensor, size: int) -> Tensor:
    """x with zeros behind the numbers of its last axis, `size` together."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def behind_both(state: Tensor, K: int, V: int) -> Tensor:
    """A state [.. K V] with zeros behind its columns and its rows."""
    return behind(behind(state, V).mT, K).mT
