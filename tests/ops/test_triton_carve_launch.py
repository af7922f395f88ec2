"""Launches that repeat, without a GPU: what they hand to Triton's C function is what Triton itself would."""

from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from needlework.ops.carve.feedback.repeated import VARIES, Repeated, launch_all
from needlework.ops.runtime import launcher, replayed
from needlework.ops.runtime.recording import Chain, Launch, Register

SIGNATURE = {"x": "tensordesc<fp16[16, 16]>", "p": "*fp32", "i": "i32", "y": "tensordesc<fp16[16, 16]>", "N": "constexpr"}
BLOCK = {"swizzle": 1, "elem_size": 2, "elem_type": 6, "block_size": [16, 16], "fp4_padded": False}


class Kernel:
    """One that is compiled already, and notes what reaches the C function."""

    def __init__(self, described: bool):
        self.calls, signature = [], SIGNATURE if described else {n: x for n, x in SIGNATURE.items() if n not in "xy"}
        self.arg_names, c_function = list(signature), Bare(self.calls)
        launcher = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        launcher.launch = nvidia.wrap_handle_tensordesc(c_function, signature, [BLOCK] * 2) if described else c_function
        launcher.arg_annotations, launcher.kernel_signature, launcher.gsan_enabled = "annotations", "signature", False
        launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
        for kind in ("global", "profile"):
            setattr(launcher, f"{kind}_scratch_size", 0)
            setattr(launcher, f"{kind}_scratch_align", 1)
        self.run, self.function, self.packed_metadata = launcher, 7, (4, 1, 0)

    def __getitem__(self, grid):
        def call(*args, **constants):
            args = args + tuple(constants[n] for n in self.arg_names[len(args) :] if n in constants)
            self.run(*grid, 3, self.function, self.packed_metadata, None, None, None, *args)
            return self

        return call


class Bare:
    """As a C function, it has no __closure__, and keeps no list that it is handed for arguments."""

    def __init__(self, calls: list):
        self.calls = calls

    def __call__(self, *args):
        self.calls.append((*args[:-1], *args[-1]) if isinstance(args[-1], list | tuple) else args)


@pytest.fixture
def device(monkeypatch):
    maps = lambda *facts: ("map", *map(str, facts))
    utils = SimpleNamespace(fill_tma_descriptor=maps, fill_tma_descriptor_tiled=maps)  # its name in Triton 3.6, and since
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 3, utils=utils)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(driver, "_default", active)


def addresses(call: tuple) -> tuple:
    return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in call)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_later_launches_are_the_first_one_but_for_what_varies(known, described, device, monkeypatch):
    monkeypatch.setattr(launcher, "FORMAT", launcher.FORMAT if known else None)
    x, y = (TensorDescriptor(torch.empty(32, 48, dtype=torch.float16), [32, 48], [48, 1], [16, 16]) for _ in range(2))
    p, kernel = torch.empty(3, 4), Kernel(described)
    args = (x, VARIES, VARIES, y) if described else (VARIES, VARIES)
    launch = Repeated(kernel, (5, 6, 1), {"N": 9}, *args)
    for i in range(3):
        launch(p[i], i)
    first, *later = map(addresses, kernel.calls)
    assert (launcher.c_function(kernel) is not None) == known and len(later) == 2
    place = first.index(p[0].data_ptr())
    for i, call in enumerate(later, 1):
        assert call[place] == p[i].data_ptr() and call[place + 1] == i
        assert call[:place] + call[place + 2 :] == first[:place] + first[place + 2 :]


def test_one_c_function_for_all_kernels_is_told_what_their_arguments_are(device, monkeypatch):
    """In the order in which Triton's own launchers have called it since 3.7."""
    kernel = Kernel(False)
    monkeypatch.setattr(launcher, "FORMAT", launcher.AS_LIST)
    call, blocks = launcher.c_function(kernel)
    call((5, 6, 1), 3, [11, 12])
    assert kernel.calls == [(5, 6, 1, 3, 7, False, True, (4, 1, 0), *[None] * 5, "annotations", "signature", 11, 12)]
    assert blocks == []


def test_whoever_listens_to_launches_hears_all_of_them(device):
    kernel, hook = Kernel(False), lambda *_: None
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert launcher.c_function(kernel) is None
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


class Buffer:
    """What lies on a GPU, by its address."""

    device = torch.device("cuda")

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def __eq__(self, other) -> bool:
        return self.address == other.address

    def __hash__(self) -> int:
        return self.address


@pytest.fixture
def graphs(monkeypatch):
    """What happens to CUDA graphs, on a GPU that is not there."""
    told = []

    class Graph:
        def capture_begin(self, capture_error_mode):
            told.append("capture")

        def capture_end(self):
            told.append("captured")

        def replay(self):
            told.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "outer" in told)
    monkeypatch.setattr(replayed, "interpreted", lambda: False)
    monkeypatch.setattr(replayed, "GRAPHS", 2)
    for name in ("_graphs", "_seen"):
        monkeypatch.setattr(replayed, name, OrderedDict())
    return told


def test_launches_whose_buffers_lie_where_they_lay_are_one_graph(graphs):
    def call(address: int = 0, n: int = 5) -> list:
        graphs.clear()
        launch = Repeated(Kernel(False), (1, 1, 1), {"N": 9}, Buffer(address), n, VARIES)
        launch.kernel = "kernel"
        launch_all(lambda: graphs.append("walk"), (launch,), Buffer(address + 1))
        return list(graphs)

    assert call() == ["walk"]
    assert call() == ["capture", "walk", "captured", "replay"]
    assert call() == call() == ["replay"]
    assert call(address=64) == ["walk"], "it lies elsewhere"
    assert call(n=6) == ["walk"], "another number"
    assert call() == ["replay"]


def test_old_graphs_make_room_and_nothing_is_captured_within_a_capture(graphs):
    def call(address: int) -> list:
        del graphs[1 if "outer" in graphs else 0 :]
        launch_all(lambda: graphs.append("walk"), (), Buffer(address))
        return [x for x in graphs if x != "outer"]

    for address in (1, 2, 3):
        call(address), call(address)
    assert call(3) == call(2) == ["replay"] and call(1) != ["replay"]
    graphs[:] = ["outer"]
    assert call(3) == ["walk"]


def test_a_chain_of_a_recording_is_one_graph_where_its_memory_lies_where_it_lay(graphs, monkeypatch):
    class Direct:
        def start(self, grid, stream, given):
            graphs.append(given)

    monkeypatch.setattr(launcher, "current_stream", lambda: 0)
    launch = lambda number: Launch.of(Direct(), (1, 1, 1), [None, number], [(0, Register(0), 8)], [])
    chain, other = (Chain.of([launch(5), launch(6)]) for _ in range(2))

    def call(chain: Chain, address: int) -> list:
        graphs.clear()
        chain([Buffer(address)], 0)
        return list(graphs)

    assert call(chain, 16) == [[24, 5], [24, 6]]
    assert call(chain, 16) == ["capture", [24, 5], [24, 6], "captured", "replay"]
    assert call(chain, 16) == ["replay"]
    assert call(chain, 32) == [[40, 5], [40, 6]], "it lies elsewhere"
    assert call(other, 16) == [[24, 5], [24, 6]], "launches of another recording"
