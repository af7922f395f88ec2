"""What follows from cu_seqlens, found once: the layers of a model are given the same tensor, and to read one has the host wait for the
GPU. It is kept with the tensor, until PyTorch changes that or nobody has it any more. What writes into its memory without PyTorch goes
unseen. And what follows from sizes, which is kept as it is (`standing`)."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from needlework.ops.runtime.each import every

R = TypeVar("R")


class Facts(NamedTuple):
    """Of a tensor as it was at a version."""

    version: int
    found: dict[Hashable, object]


_known = WeakTensorKeyDictionary()


def remember(x: Tensor) -> None:
    """From here on what `remembered` functions find of x is kept. Numbers on a CPU are at hand, and an inference tensor has no version."""
    if _lasts(x) and x not in _known:
        _known[x] = Facts(x._version, {})


def known(x: Tensor) -> bool:
    """Whether what is found of x is kept."""
    return x in _known


def remembered(f: Callable[..., R]) -> Callable[..., R]:
    """f(x, *facts) of a tensor and hashable facts, which does not return x itself. What it makes belongs to the stream that made it; in a
    capture it is made anew, for replays make it too."""

    @wraps(f)
    def find(x: Tensor, *facts: Hashable) -> R:
        own = _known.get(x)
        if own is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return f(x, *facts)
        if own.version != x._version:
            own = _known[x] = Facts(x._version, {})
        key = f, facts, torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None
        if key not in own.found:
            own.found[key] = f(x, *facts)
        return own.found[key]

    return find


SIZES = 256  # kept of one function


def standing(f: Callable[..., R]) -> Callable[..., R]:
    """f(device, *sizes), small tensors that nobody changes: two small kernels cost the host more than a large one. In a capture they are made
    anew, in memory of its own, and by the replays too."""
    kept: dict[Hashable, R] = {}

    @wraps(f)
    def find(device: torch.device, *sizes: int) -> R:
        key = device, *sizes
        if key in kept:
            return kept[key]
        made = f(device, *sizes)
        tensors = list(every(Tensor, (made,)))
        cuda = any(x.is_cuda for x in tensors)
        if all(type(x) is Tensor for x in tensors) and not (cuda and torch.cuda.is_current_stream_capturing()):
            if cuda:
                torch.cuda.current_stream(device).synchronize()  # any stream may read them now
            if len(kept) >= SIZES:
                kept.clear()
            kept[key] = made
            for x in tensors:
                remember(x)
        return made

    return find


def _lasts(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_cuda and not x.is_inference()
