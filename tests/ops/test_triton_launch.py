"""Launches by the C function, without a GPU: what reaches it is what Triton itself would hand over, and only where that holds."""

import os
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from needlework.ops.runtime import launcher  # noqa: E402
from needlework.ops.runtime.launcher import launch  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing")


@triton.jit(do_not_specialize=["n"])
def copy(x, p, n, scale, nothing, N: tl.constexpr, TIMES: tl.constexpr, MORE: tl.constexpr = 0):
    tl.store(p + tl.arange(0, N), tl.sum(x.load([0, 0]).to(tl.float32), 0) * scale + n * TIMES + MORE)


@triton.jit
def add(p, n, N: tl.constexpr):
    tl.store(p + tl.arange(0, N), tl.full([N], n, tl.float32))


@pytest.fixture
def calls(monkeypatch):
    """What reaches the C function, on a GPU that is not there."""
    made = []

    def built(src, metadata):
        new = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        bare = type("Bare", (), {"__call__": lambda self, *args: made.append(args)})()
        new.arg_annotations, new.kernel_signature, new.gsan_enabled = "annotations", "signature", False
        new.launch = nvidia.wrap_handle_tensordesc(bare, dict(src.signature), metadata.tensordesc_meta)
        new.num_ctas, new.launch_cooperative_grid, new.launch_pdl = 1, False, False
        for kind in ("global", "profile"):
            setattr(new, f"{kind}_scratch_size", 0)
            setattr(new, f"{kind}_scratch_align", 1)
        return new

    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 3, launcher_cls=built,
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=lambda *_: (1, 2, 32, 0, 1024),
            **dict.fromkeys(ENCODERS, lambda *facts: ("map", *map(str, facts))),
        ),
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(driver, "_default", active)
    monkeypatch.setattr(launcher, "_direct", {})
    for kernel in (copy, add):
        kernel.device_caches.clear()
    return made


ENCODERS = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")  # its name in Triton 3.6, and since
ONCE = {"N": 16, "TIMES": 1, "MORE": 0}


def same(a: tuple, b: tuple) -> bool:
    """Addresses for tensors; what hooks would get is left out: there are none."""
    if launcher.FORMAT == launcher.AS_LIST:
        a, b = ((*call[:8], *call[11:15], *call[15]) for call in (a, b))
    else:
        a, b = ((*call[:10], *call[13:]) for call in (a, b))
    address = lambda x: x.data_ptr() if isinstance(x, torch.Tensor) else x
    return [*map(address, a)] == [*map(address, b)]


def tile(dtype: torch.dtype = torch.float16) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(32, 48, dtype=dtype), [32, 48], [48, 1], [16, 16])


def test_another_triton_is_known_by_what_its_c_function_reads(tmp_path):
    """Both kinds, and none where anything else is read."""
    old, new, other = (lambda arg, metadata: 0), (lambda arg, metadata, _: 0), (lambda arg, metadata, launcher: 0)
    file = tmp_path / "driver.py"
    known = lambda **has: launcher.read_by(SimpleNamespace(__file__=str(file), **has))
    assert known(_BASE_ARGS_FORMAT="iiiKKppOOOOOO", make_tensordesc_arg=old) == launcher.ONE_BY_ONE
    assert known() is known(make_tensordesc_arg=old) is known(_BASE_ARGS_FORMAT="iiiKKpOOOOO", make_tensordesc_arg=old) is None
    for reads, found in (("iiiKKpp(iii)OOOOOOy*O", launcher.AS_LIST), ("iiiKKpp(iiii)OOOOOOy*O", None)):
        file.with_name("driver.c").write_text(f'if (!PyArg_ParseTuple(args, "{reads}", &gridX))')
        assert known(make_tensordesc_arg=old) == known(make_tensordesc_arg=new) == found
        assert known(make_tensordesc_arg=other) is None


def own_way(kernel, grid, arguments, constants, calls) -> tuple:
    kernel[grid](*arguments, **constants)
    return calls.pop()


def test_every_later_launch_is_what_triton_would_have_done(calls):
    constants = {"N": 16, "TIMES": 2, "MORE": 0, "num_warps": 1}
    for n in (0, 1, 16, 1 << 40):
        for dtype in (torch.float16, torch.float32):
            arguments = tile(dtype), torch.empty(16), n, 0.5, None
            for _ in range(2):
                launch(copy, (5, 2), arguments, constants)
                assert same(calls.pop(), own_way(copy, (5, 2), arguments, constants, calls))
    assert len(launcher._direct) == 4 and all(launcher._direct.values())  # two types, 32 and 64 bits


def test_constants_make_another_kernel_by_name_and_value(calls):
    for constants in ({"N": 16, "TIMES": 1, "MORE": 2}, {"N": 16, "MORE": 1, "TIMES": 2}):
        arguments = tile(), torch.empty(16), 3, 0.5, None
        for _ in range(2):
            launch(copy, (1,), arguments, constants)
            assert same(calls.pop(), own_way(copy, (1,), arguments, constants, calls))
    assert len({id(direct.compiled) for direct in launcher._direct.values()}) == 2


def test_descriptors_of_the_same_memory_are_encoded_once_and_of_other_memory_anew(calls, monkeypatch):
    x, y, out = tile(), tile(), torch.empty(16)
    given = lambda x: (x, out, 1, 0.5, None)
    launch(copy, (1,), given(x), ONCE)
    encoded = []
    for name in ENCODERS:
        monkeypatch.setattr(driver.active.utils, name, lambda *facts: encoded.append(facts[0]) or ("map", *map(str, facts)))
    for each in (x, y, x, y):
        launch(copy, (1,), given(each), ONCE)
    assert encoded == [x.base.data_ptr(), y.base.data_ptr()]


def test_what_triton_specialises_on_goes_its_way(calls):
    whole = torch.empty(64)
    for p, n in ((whole, 1), (whole, 16), (whole, 3), (whole[1:], 3)):
        for _ in range(2):
            launch(add, (1,), (p, n), {"N": 16})
            assert same(calls.pop(), own_way(add, (1,), (p, n), {"N": 16}, calls))
    assert not any(launcher._direct.values())  # n is one of those that Triton looks at
    arguments = tile(), whole[1:], 3, 0.5, None
    for _ in range(2):
        launch(copy, (1,), arguments, ONCE)
        assert same(calls.pop(), own_way(copy, (1,), arguments, ONCE, calls))
    assert not any(launcher._direct.values())


def test_whoever_listens_hears_every_launch(calls):
    arguments, heard = (tile(), torch.empty(16), 3, 0.5, None), []
    hook = lambda *_: heard.append(1)
    launch(copy, (1,), arguments, ONCE)
    knobs.runtime.launch_exit_hook.add(hook)
    try:
        for _ in range(2):
            launch(copy, (1,), arguments, ONCE)
    finally:
        knobs.runtime.launch_exit_hook.remove(hook)
    assert launcher._hooked() is False and len(calls) == 3
