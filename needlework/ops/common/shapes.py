"""Argument checks that every op makes: each error names the tensor, the axis and both sizes."""

from torch import Tensor


def check(name: str, x: Tensor, axes: str, **sizes: int) -> None:
    """Raise ValueError unless x has the axes of `axes` ("B T H K") with the sizes that are given.

    Axes not in `sizes` may have any size.
    """
    letters = axes.split()
    if x.dim() != len(letters):
        raise ValueError(f"{name}: expected {len(letters)} axes [{axes}], got shape {list(x.shape)}")
    for axis, letter in enumerate(letters):
        if letter in sizes and x.shape[axis] != sizes[letter]:
            raise ValueError(f"{name}: axis {axis} ({letter}) of [{axes}] has size {x.shape[axis]}, expected {sizes[letter]}")


def check_dtypes(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors share one floating dtype (q, k, v: a mixture is a forgotten cast)."""
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
