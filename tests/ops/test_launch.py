"""Which implementation and which launch config is taken, and why not another."""

import os
import warnings
from importlib import import_module
from itertools import product
from pkgutil import walk_packages
from typing import get_origin, get_type_hints

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import config

from needlework.ops.api import _warn_once, resolve
from needlework.ops.common.alignment import Alignment
from needlework.ops.delta import chunk_delta, recurrent_delta
from needlework.ops.qdelta import chunk_qdelta
from needlework.ops.runtime import compile_cache, denylist, launch_configs, target
from needlework.ops.runtime.target import compute_capability
from needlework.ops.unit.reference import unit_rows
from needlework.testing import targets

CPU, GPU, GPU_0 = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """No verdicts but a test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NEEDLEWORK_IMPL", raising=False)
    denylist._read.cache_clear()
    yield
    denylist._read.cache_clear()


def test_auto_takes_the_kernels_on_a_gpu_and_torch_where_they_do_not_fit():
    pytest.importorskip("triton")
    assert resolve("x", "auto", GPU, lambda: None) == "triton"
    assert resolve("x", "auto", GPU, lambda: "too wide") == "torch"
    assert resolve("x", "auto", GPU) == "torch"
    assert resolve("x", "auto", CPU, lambda: None) == "torch"


def test_the_environment_asks_for_kernels_in_the_interpreter_and_gets_torch_where_they_do_not_fit(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    assert resolve("x", "auto", CPU, lambda: None) == "triton"
    assert resolve("x", "auto", CPU, lambda: "too wide") == "torch"


@pytest.mark.parametrize(("device", "reason"), [(GPU, "too wide"), (CPU, "no CUDA device")])
def test_an_explicit_request_is_obeyed_or_refused_with_the_reason(monkeypatch, device, reason):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=reason):
        resolve("x", "triton", device, lambda: "too wide")
    monkeypatch.setattr("needlework.ops.api._installed", lambda: False)
    with pytest.raises(ValueError, match="not installed"):
        resolve("x", "triton", device, lambda: None)


def test_a_compiled_graph_compares_what_it_takes_as_constants(monkeypatch):
    """torch.compile of 2.11 raises where two tuples are compared of which one is such an answer."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(target, "_asked", lambda index: (9, 0))

    def call(x):
        K = x.shape[-1]
        new = compute_capability(GPU_0) >= (9, 0)
        return x + 1 if new and launch_configs.widths("delta/scalar", GPU_0, torch.bfloat16, K, K) != (K, K) else x

    x = torch.zeros(60)
    assert torch.compile(call, fullgraph=True, backend="eager")(x).sum() == 60


def test_what_a_graph_takes_as_a_constant_is_no_tuple_but_in_its_own_module():
    pytest.importorskip("triton")
    import needlework.ops

    modules = [import_module(module.name) for module in walk_packages(needlework.ops.__path__, "needlework.ops.")]
    constants = {
        f for module in modules for f in vars(module).values() if getattr(f, "__dict__", {}).get("_dynamo_marked_constant")
    }
    assert {"_widths", "_capability", "misfit"} <= {f.__name__ for f in constants}
    assert [f for f in constants if not f.__name__.startswith("_") and get_origin(get_type_hints(f)["return"]) is tuple] == []


def test_a_launch_config_on_the_denylist_is_not_taken_and_torch_says_why_once(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(launch_configs, "capability", lambda device: (8, 0))
    arguments = "delta/scalar", CPU, torch.float32, 64, 64
    assert launch_configs.misfit(*arguments) is None
    denylist.record({f"delta/scalar/{row.name}": "dk 31.00" for row in launch_configs.rows("delta/scalar")})
    assert "dk 31.00" in launch_configs.misfit(*arguments)
    _warn_once.cache_clear()
    with pytest.warns(UserWarning, match="denylist"):
        assert resolve("delta", "auto", GPU, lambda: launch_configs.misfit(*arguments)) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("delta", "auto", GPU, lambda: launch_configs.misfit(*arguments)) == "torch"
    denylist.record({f"delta/scalar/{row.name}": None for row in launch_configs.rows("delta/scalar")})
    assert launch_configs.misfit(*arguments) is None


GPUS = {"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
# bytes of shared memory that a program may have there, from NVIDIA's table of compute capabilities
HAD = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}


@pytest.mark.parametrize("gpu", GPUS)
def test_what_is_picked_fits_the_gpu(gpu):
    """Every size that a table has a row for on Hopper is picked one for on the other GPUs too, and none that wants more than there is."""
    arch, none_denied = GPUS[gpu], frozenset()
    assert launch_configs.shared_memory(arch) == HAD[gpu] * 1024
    for engine, dtype, (K, V) in product(targets.ENGINES, ("bfloat16", "float16", "float32"), targets.SIZES):
        try:
            launch_configs._picked(engine, (9, 0), dtype, K, V, none_denied)
        except launch_configs.Unsupported:
            continue
        row = launch_configs._picked(engine, arch, dtype, K, V, none_denied)
        assert row.shared_memory <= HAD[gpu] * 1024 and row.arch <= arch, row.name
        assert row.before is None or arch < row.before, row.name


def test_a_call_without_a_row_that_fits_is_told_what_each_row_wants_and_what_there_is(monkeypatch):
    large = [row for row in launch_configs.rows("delta/scalar") if row.shared_memory]
    monkeypatch.setattr(launch_configs, "rows", lambda engine: large)
    wants = "sm90-k256 needs 232,448 bytes of shared memory, 12.0 has 101,376"
    with pytest.raises(launch_configs.Unsupported, match="does not compile for compute capability"):
        launch_configs._picked.__wrapped__("delta/scalar", (12, 0), "bfloat16", 256, 512, frozenset())
    only = [row._replace(before=None) for row in large]
    monkeypatch.setattr(launch_configs, "rows", lambda engine: only)
    with pytest.raises(launch_configs.Unsupported, match=wants):
        launch_configs._picked.__wrapped__("delta/scalar", (12, 0), "bfloat16", 256, 512, frozenset())


def test_graphs_kept_on_disk_are_known_by_tables_and_verdicts():
    """A graph has the sizes of its config: with that on the denylist it must not be found again."""
    x = dict.fromkeys("qkv", torch.ones(1, 4, 1, 8))

    def key(compiled=True):
        compile_cache._known.cache_clear()
        torch.compiler.reset()
        with config.patch(cache_key_tag="mine"):
            for dtype in (torch.float32, torch.float64):  # two graphs
                y = {name: tensor.to(dtype) for name, tensor in x.items()}
                (torch.compile(chunk_delta, backend="eager", fullgraph=True) if compiled else chunk_delta)(**y)
            return config.cache_key_tag

    before = key()
    assert before.startswith("mine needlework ") and before.count("needlework") == 1 and before == key()
    assert key(compiled=False) == "mine"
    denylist.record({"delta/scalar/plain": "dk 31.00"})
    assert key() != before
    compile_cache._known.cache_clear()


def test_float64_is_for_the_interpreter_alone(monkeypatch):
    monkeypatch.setattr(launch_configs, "capability", lambda device: (9, 0))
    assert "float64" in launch_configs.misfit("delta/scalar", GPU, torch.float64, 64, 64)
    monkeypatch.setattr(launch_configs, "capability", lambda device: launch_configs.INTERPRETER)
    assert launch_configs.misfit("delta/scalar", CPU, torch.float64, 64, 64) is None


def test_a_launch_config_can_be_asked_for_and_changed_also_on_another_thread(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(launch_configs, "capability", lambda device: launch_configs.INTERPRETER)
    arguments = "delta/scalar", CPU, torch.bfloat16, 64, 64
    usual = launch_configs.launch_config(*arguments)
    with launch_configs.forced("delta/scalar", "sm90-k128", scan={"NS": 2}), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(launch_configs.launch_config, *arguments).result()
    assert asked.name == "sm90-k128" and asked.launch["scan"]["NS"] == 2
    assert launch_configs.launch_config(*arguments) == usual != asked


def sample():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    return q, k, v, torch.rand(2, 9, 2, generator=generator, dtype=torch.float64)


def test_l2norm_is_to_divide_q_and_k_first_and_not_q_read():
    q, k, v, beta = sample()
    want = chunk_delta(unit_rows(q), unit_rows(k), v, None, beta).o
    for function in (chunk_delta, recurrent_delta):
        torch.testing.assert_close(function(q, k, v, None, beta, l2norm=True).o, want, rtol=1e-12, atol=1e-12)
    read = chunk_delta(q, k, v, None, beta, q_read=v, l2norm=True).o
    torch.testing.assert_close(read, chunk_delta(q, unit_rows(k), v, None, beta, q_read=v).o, rtol=1e-12, atol=1e-12)
    got = chunk_qdelta(q, k, v, None, beta, beta, l2norm=True).o
    torch.testing.assert_close(got, chunk_qdelta(unit_rows(q), unit_rows(k), v, None, beta, beta).o, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")
@pytest.mark.parametrize("D", [1, 6, 128, 200])
def test_rows_of_unit_norm_by_a_kernel_with_their_gradient(D):
    from needlework.ops.unit.rows import l2_rows

    x = torch.randn(3, 7, D, dtype=torch.float64)
    x[0, 0] = 0
    weight = torch.randn_like(x)
    results = []
    for function in (l2_rows, unit_rows):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y, *torch.autograd.grad((y * weight).sum(), leaf)))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-12 * want.norm()
    torch.library.opcheck(
        torch.ops.needlework.l2_rows_fwd.default, (x.requires_grad_(),), test_utils=("test_schema", "test_faketensor")
    )


def test_rows_of_unit_norm_where_no_launch_config_may_be_taken(monkeypatch):
    triton_l2 = pytest.importorskip("needlework.ops.unit.rows")
    monkeypatch.setattr(triton_l2, "misfit", lambda *_: "is on doctor's denylist")
    x = torch.randn(3, 7, 20, dtype=torch.float64)
    torch.testing.assert_close(triton_l2.l2_rows(x), unit_rows(x))


def test_the_chunks_of_equal_rows_are_made_once_and_none_that_hold_nothing_are_kept():
    with FakeTensorMode():
        Alignment.of(None, 3, 7000, 16, CPU)
    first, again, longer = (Alignment.of(None, 3, T, 16, CPU).cum for T in (7000, 7008, 7009))
    assert first is again and first.tolist() == [0, 438, 876, 1314] and longer.tolist() == [0, 439, 878, 1317]
