"""Launches by the hundred, replayed as a CUDA graph where everything lies where it lay before."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from needlework.ops.runtime.launch_configs import interpreted
from needlework.ops.runtime.precompile import precompiling

GRAPHS = 128  # kept: forward and backward of as many layers as half of them
_graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
_seen: OrderedDict[Hashable, None] = OrderedDict()


def replayed(walk: Callable[[], None], device: torch.device, place: Callable[[], Hashable]) -> None:
    """walk(), which launches and does nothing else on the device; place(): all that its launches depend on, addresses too.

    The second time that it is the same place the launches are captured, and after that replayed: on the device nothing differs, on the
    host one launch takes the place of hundreds.
    """
    if interpreted() or precompiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return walk()
    key = place()
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
