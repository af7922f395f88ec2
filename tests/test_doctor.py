"""Doctor: it sees a wrong kernel and no wrong in a right one, denies a wrong config, and says what it needs where it cannot run."""

import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch

from needlework.ops.delta import DeltaOutput, chunk_delta
from needlework.ops.runtime import denylist, launch_configs
from needlework.ops.runtime.target import TARGETS, for_amd
from needlework.testing import builds, compare, doctor, helpers, processes, target_inputs, targets, verdict
from needlework.testing.errors import operand
from needlework.testing.rows import chosen

TASK = verdict.Task("delta/gated", "delta/scalar", "plain", "float32", 16, 16, ("short", "packed"))


def command(*arguments, **environment):
    run = [sys.executable, "-m", "needlework", "doctor", *arguments]
    return subprocess.run(run, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """No verdicts but a test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    denylist._read.cache_clear()
    yield
    denylist._read.cache_clear()


def kernels(monkeypatch, chunk):
    """`chunk` in the place of the rule's kernels."""
    spec = dataclasses.replace(target_inputs.spec_of(TASK.rule), chunk=chunk)
    monkeypatch.setattr(verdict, "spec_of", lambda rule: spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do(needlework, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "--compile-only" in needlework("doctor", ok=False)


@pytest.mark.slow
def test_it_runs_in_the_interpreter_and_writes_a_report(tmp_path):
    pytest.importorskip("triton")
    done = command("--full", "--report", str(tmp_path / "r.json"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    total = len(report["rows"])
    assert all(f"{count} of {total}: " in done.stdout for count in range(1, total + 1)), "a full run reports each row at once"
    assert all(row["seconds"] > 0 for row in report["rows"])
    assert {row["engine"] for row in report["rows"]} == {e for rule in targets.RULES for e in (rule.chunk, rule.step)} - {None}
    assert report["triton"] and report["ptxas"]


def test_every_engine_has_a_table_and_every_table_an_engine():
    from needlework.ops import common

    folder = launch_configs.Path(common.__file__).parents[1]
    tables = {str(path.relative_to(folder)).removesuffix(".launch.json") for path in folder.glob("*/*.launch.json")}
    assert tables == set(targets.ENGINES)
    files = [x for x in folder.rglob("*.py") if "\ndef compile_cases" in x.read_text()]
    kernels = {".".join(x.relative_to(folder).with_suffix("").parts) for x in files}
    assert kernels == {file for files in targets.ENGINES.values() for file in files}
    assert {rule.spec for rule in targets.RULES} <= {spec.name for spec in target_inputs.judged()}


@pytest.mark.parametrize("rule", targets.RULES, ids=lambda rule: rule.spec)
def test_every_rule_has_inputs_at_any_size(rule):
    spec = target_inputs.spec_of(rule.spec)
    V = 20 if rule.keys_alone else 24
    for style in target_inputs.styles(spec):
        inputs = target_inputs.sample(rule.spec, torch.Generator().manual_seed(0), 2, 3, style, 20, V)
        _, result = next(compare.leaves(spec.recurrent(**inputs)))
        assert result.shape[:2] == (2, 3) and result.shape[-1] == V and torch.isfinite(result).all()


def test_a_right_form_passes(monkeypatch):
    kernels(monkeypatch, lambda impl, **x: chunk_delta(**x, impl="torch"))
    verdicts = verdict.judge("cpu", True, TASK)
    assert [v.form for v in verdicts] == ["short", "packed"]
    assert not any(v.failing or v.wrong for v in verdicts) and all(0 < v.ratio <= 1 for v in verdicts)


@pytest.mark.parametrize("tensor", chosen(["o", "state", "dq", "dbeta"], quick=["state", "dbeta"]))
def test_a_nan_in_any_tensor_is_the_configs_fault(monkeypatch, tensor):
    """Also in one that is not the first to be compared."""

    class Nan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, backward):
            ctx.backward = backward
            return x.clone() if backward else x * math.nan

        @staticmethod
        def backward(ctx, dx):
            return (dx * math.nan if ctx.backward else dx), None

    def chunk(impl, **x):
        x = {name: Nan.apply(given, True) if f"d{name}" == tensor else given for name, given in x.items()}
        out = chunk_delta(**x, impl="torch")
        return out._replace(**{tensor: Nan.apply(getattr(out, tensor), False)}) if tensor in out._fields else out

    kernels(monkeypatch, chunk)
    monkeypatch.setattr(verdict, "DRAWS", 2)
    for found in verdict.judge("cpu", True, TASK):
        assert found.tensor.split(",")[0] == tensor and found.ratio == math.inf and found.wrong and found.failing


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch_configs, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch_configs, "interpreted", lambda: False)


def test_a_default_run_judges_every_launch_config_that_is_taken_in_all_its_dtypes_and_every_rule(hopper):
    todo, everything = (doctor.tasks(torch.device("cuda"), full) for full in (False, True))
    for engine in targets.ENGINES:
        covering = {rule.spec: rule for rule in targets.RULES if rule.covers and engine in (rule.chunk, rule.step)}
        expected = set(verdict.ROWS) if any(rule.chunk == engine for rule in covering.values()) else set()
        for rule in covering.values():
            if rule.step == engine:
                expected |= set(verdict.SEVERAL if rule.several else verdict.STEP)
        for row in launch_configs.rows(engine):
            taken = {dtype for dtype in row.dtypes if dtype != "float64" and targets.taken(row, (9, 0), dtype)}
            here = [task for task in todo if (task.engine, task.config) == (engine, row.name)]
            assert {task.dtype for task in here} == {task.dtype for task in here if task.rule in covering} == taken
            first = next((dtype for dtype in row.dtypes if dtype in taken), None)
            grows = any(rule.grows and rule.chunk == engine for rule in covering.values()) and first == "bfloat16"
            forms = {form for task in here if task.rule in covering for form in task.forms}
            assert forms == (expected | set(verdict.GROWN if grows else ()) if taken else set())
        may = {row.name for row in launch_configs.rows(engine) if row.arch <= (9, 0)}
        assert {task.config for task in everything if task.engine == engine} == may
    for rule in targets.RULES:
        for engine in {rule.chunk, rule.step} - {None}:
            assert any(task.rule == rule.spec and task.engine == engine and task.dtype == "bfloat16" for task in todo)
    assert len({task[:6] for task in todo}) == len(todo), "nothing twice"
    assert {task[:6] for task in todo} < {task[:6] for task in everything}
    assert {"float16"} == {dtype for _, config, dtype in {task[1:4] for task in everything} if config.endswith("-f16")}


def test_what_is_taken_in_the_place_of_a_denied_launch_config_is_judged_too(hopper, monkeypatch):
    """Of LUCID's table only the last rows are right: they are judged in the run that puts the others on the denylist."""
    asked = []

    def judged(device, todo, processes):
        if configs := {task.config for task in todo if task.engine == "lucid/solve"}:
            asked.append(configs)
        for task in todo:
            yield verdict.unjudged(task, "", wrong=task.config.startswith("sm"))

    monkeypatch.setattr(doctor, "judged", judged)
    monkeypatch.setattr(doctor, "_processes", lambda device: 1)
    doctor.run(torch.device("cuda"), False, lambda *_: None)
    own = {"sm90", "sm90-k128-v64", "sm90-128", "sm90-k64-v256", "sm90-k128-v256", "sm90-256"}
    assert asked[0] == own | {"sm80", "plain-64", "plain"}
    assert asked[1:] == [{"sm80", "sm80-256"}, {"panels", "plain"}]


@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_every_row_that_is_picked_is_compiled_and_judged_at_some_size(arch):
    everywhere = [(K, V) for K in range(16, 257, 16) for V in range(16, 513, 16)]
    for engine in {engine for rule in targets.RULES for engine in (rule.chunk, rule.step) if engine}:
        for dtype in ("bfloat16", "float16", "float32"):
            first = lambda K, V, engine=engine, dtype=dtype: next(
                (row.name for row in launch_configs.rows(engine) if row.misfit(arch, dtype, K, V) is None), None
            )
            assert {first(*size) for size in everywhere} <= {first(*size) for size in targets.SIZES} | {None}, (engine, dtype)


def test_one_sequence_alone_is_long_enough_to_be_cut(hopper):
    """A default run also judges what runs only where few heads meet a long sequence, in every config for large sizes."""
    pytest.importorskip("triton")
    from needlework.ops.delta.segments import segment_count

    long = next(rule.long for rule in targets.RULES if rule.spec == "qdelta")
    todo = [task for task in doctor.tasks(torch.device("cuda"), False) if "long" in task.forms]
    assert {task.config for task in todo if task.engine == "delta/scalar"} >= {"sm90-k128", "sm90-k256", "plain"}
    assert {task.config for task in todo if task.engine == "ccq/curvature"} >= {"sm90-k128", "sm90-k256", "plain"}
    for task in todo:
        if task.engine == "delta/scalar":
            row = next(row for row in launch_configs.rows(task.engine) if row.name == task.config)
            scan, chunks = row.launch["scan"], long // row.launch["shared"]["C"]
            assert segment_count(2 * -(-task.V // scan["BV"]), chunks, task.K, task.V, scan["NP"]) > 1
        if task.engine == "ccq/curvature":
            row = next(row for row in launch_configs.rows(task.engine) if row.name == task.config)
            walk, chunks = row.launch["walk"], long // row.launch["shared"]["C"]
            assert segment_count(2 * -(-task.K // walk["BV"]), chunks, 0, task.K, walk["NP"]) > 1


def test_processes_are_born_with_what_takes_seconds_to_import():
    pytest.importorskip("triton")
    imported = f"set({processes.IMPORTED}) <= set(__import__('sys').modules)"
    with ProcessPoolExecutor(1, mp_context=processes.context()) as pool:
        assert pool.submit(eval, imported).result()
        assert not pool.submit(eval, "__import__('torch').cuda._is_in_bad_fork()").result(), "the server has no GPU"


class Does:
    """A task's part that does something to the process that it is sent to."""

    def __init__(self, what, argument):
        self.what = what, (argument,)

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize(
    ("what", "argument", "limit", "told"),
    [(os._exit, 3, 300, "its process died"), (time.sleep, 10**6, 0.5, "did not end in 0.5 s")],
)
def test_a_kernel_that_dies_or_hangs_ends_its_own_process_alone(monkeypatch, what, argument, limit, told):
    monkeypatch.setattr(helpers, "LIMIT", limit)
    (found,) = helpers.judged(torch.device("cpu"), [TASK._replace(rule=Does(what, argument))], 2)
    assert found.wrong and found.failing == (told,)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (3, 2), (8, 1), (20, 1)])
def test_processes_share_the_cores_that_there_are_to_compile(monkeypatch, processes, threads):
    found, (ours, theirs) = [], multiprocessing.Pipe()
    monkeypatch.setattr(helpers, "cores", lambda: 8)
    monkeypatch.setattr(helpers, "compile_in", found.append)
    monkeypatch.setattr(helpers.signal, "signal", lambda *_: None)
    ours.close()  # nobody has a task
    with pytest.raises(EOFError):
        helpers._serve(theirs, "cpu", processes)
    assert found == [threads]


def test_what_came_to_no_verdict_beside_others_is_judged_again_alone(monkeypatch):
    calls = []

    def outcomes(device, todo, processes):
        calls.append((todo, processes))
        for task in todo:
            yield task, (None if processes > 1 and task.K == 32 else [verdict.unjudged(task, "")])

    monkeypatch.setattr(helpers, "_outcomes", outcomes)
    small, large = TASK, TASK._replace(K=32)
    assert [v.K for v in helpers.judged(torch.device("cpu"), [large, small], 4)] == [16, 32]
    assert calls == [([large, small], 4), ([large], 1)]


def test_a_wrong_tensor_is_named_and_its_launch_config_denied_in_that_dtype(monkeypatch):
    def wrong(impl, **x):
        o, state = chunk_delta(**x, impl="torch")
        return DeltaOutput(o, state * torch.linspace(1, 1.001 if impl == "triton" else 1, state.shape[-1]))

    kernels(monkeypatch, wrong)
    monkeypatch.setattr(verdict, "DRAWS", 2)
    verdicts = verdict.judge("cpu", True, TASK)
    assert all(v.wrong and any(what.startswith("state") for what in v.failing) for v in verdicts)
    denylist.record(doctor.outcome(verdicts, full=False))
    assert "state" in denylist.denied(TASK.engine, TASK.config, "float32")
    assert denylist.denied(TASK.engine, TASK.config, "float16") is None
    passed = [v._replace(failing=(), wrong=False) for v in verdicts]
    denylist.record(doctor.outcome(passed, full=False))
    assert denylist.denied(TASK.engine, TASK.config), "a short run has not seen what a full one saw"
    denylist.record(doctor.outcome(passed, full=True))
    assert denylist.denied(TASK.engine, TASK.config) is None


def test_what_is_over_its_budget_by_less_than_twice_fails_but_is_not_denied(monkeypatch):
    for ratio, wrong in ((1.5, False), (2.5, True)):
        monkeypatch.setattr(verdict, "weigh", lambda *_, ratio=ratio: ({"o": ratio}, (f"o {ratio}",)))
        assert all(v.failing and v.wrong is wrong for v in verdict.judge("cpu", True, TASK))


def test_what_differs_between_two_runs_is_wrong(monkeypatch):
    class Wavering:
        calls = 0

        def __call__(self, impl, **x):
            self.calls += impl == "triton"
            o, state = chunk_delta(**x, impl="torch")
            return DeltaOutput(o * (1 + 1e-7 * (self.calls % 2)), state)

    kernels(monkeypatch, Wavering())
    found = verdict.judge("cpu", True, TASK)[0]
    assert found.wrong and any("differs between two runs" in what for what in found.failing)


def test_memory_that_is_not_written_shows(monkeypatch):
    def forgets(impl, **x):
        o, state = chunk_delta(**x, impl="torch")
        return DeltaOutput(o + 0 * torch.empty(1), state)

    kernels(monkeypatch, forgets)
    assert verdict.judge("cpu", True, TASK)[0].wrong


@pytest.mark.parametrize(
    ("ratios", "fails"),
    [
        ([0.5], False),
        ([1.3, 0.5], False),  # chance
        ([31.0] * verdict.DRAWS, True),
        ([1.2, 0.9] * (verdict.DRAWS // 2), True),  # over in the mean
        ([float("nan")] * verdict.DRAWS, True),
    ],
)
def test_a_tensor_fails_by_the_mean_of_many_draws(monkeypatch, ratios, fails):
    left = iter(ratios)
    monkeypatch.setattr(verdict, "draw", lambda *_: ({"dk": next(left)}, []))
    found, failing = verdict.weigh(TASK, "short", "cpu")
    assert bool(failing) == fails and list(left) == []
    assert set(found) == {"dk"}


def test_packed_sequences_that_grow_are_each_beyond_float16():
    """The larger of the two alone would take the call to the fallback; the second starts from nothing."""
    spec, ends = target_inputs.spec_of("qdelta"), torch.tensor(verdict.ENDS["grown-packed"])
    x, _ = verdict._inputs(TASK._replace(rule="qdelta"), spec, "grown-packed", 0)
    _, states = spec.chunk(**x, cu_seqlens=ends, output_final_state=True)
    largest = states.abs().amax((1, 2, 3))
    assert (largest > torch.finfo(torch.float16).max).tolist() == [True, False, True]


def test_growing_states_are_judged_by_the_definitions_own_error_too(monkeypatch):
    """In bfloat16 it is three times the printed form's, which rounds a state once a chunk."""
    spec = target_inputs.spec_of("qdelta")
    definition = partial(spec.recurrent, operand=operand(torch.bfloat16))

    def rounded(impl, **x):
        if impl == "torch":
            return spec.chunk(**x)
        return definition(**x | {name: x[name].float() for name in "qkv"})

    monkeypatch.setattr(verdict, "spec_of", lambda rule: dataclasses.replace(spec, chunk=rounded))
    task = verdict.Task("qdelta", "delta/scalar", "plain", "bfloat16", 32, 32, ("grown-packed",))
    found, differing = verdict.draw(task, "grown-packed", "cpu", 0)
    assert max(found.values()) <= 1 and not differing, found


def test_an_error_is_a_verdict_and_want_of_memory_is_none(monkeypatch):
    def raises(error):
        def weigh(*_):
            raise error

        monkeypatch.setattr(verdict, "weigh", weigh)

    raises(RuntimeError("ptxas died\nwith a log"))
    assert [(v.wrong, v.failing) for v in verdict.judge("cpu", True, TASK)] == [(True, ("RuntimeError: ptxas died",))] * 2
    raises(torch.OutOfMemoryError("16 GiB"))
    assert verdict.judge("cpu", False, TASK) is None, "to be judged again without neighbours"
    assert [v.wrong for v in verdict.judge("cpu", True, TASK)] == [False] * 2


def test_compile_only_takes_every_launch_config_and_says_what_does_not_compile(monkeypatch):
    pytest.importorskip("triton")
    found = builds.tasks(False)
    for full, latest, names in ((False, (9, 0), {"sm_89", "sm_90"}), (True, (10, 0), {"sm_80", "sm_89", "sm_90", "sm_100"})):
        todo = builds.tasks(full)
        for engine in targets.ENGINES:
            may = {row.name for row in launch_configs.rows(engine) if row.arch <= latest}
            assert {task.config for task in todo if task.engine == engine} == may
        assert {task.target for task in todo} == names
    few = next(task for task in found if not task.variants)
    made = [build.kernel for build in builds._compile(few)]
    assert sorted(made) == ["intra", "scan", "scan"]  # the scan without and with a slot table

    def breaks(case, target):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("needlework.ops.runtime.compile.compile_case", breaks)
    assert {build.error for build in builds._compile(few)} == {"RuntimeError: PassManager::run failed"}


def test_fewer_variants_keep_those_of_other_warps():
    """PaTH's attend has a program for two heads, and for one where each has gates: the first has fewer arguments and takes more memory."""
    pytest.importorskip("triton")
    (task,) = (task for task in builds.tasks(False) if (task.file, task.config) == ("path.engine.op", "sm90-128"))
    kept = [case for case in builds.fewer(_cases(task)) if case.kernel.__name__ == "attend"]
    assert [case.constexprs["HB"] for case in kept] == [case.options["num_warps"] // 4 for case in kept] == [2, 1]


def test_a_kernel_that_does_not_fit_the_target_is_an_error_that_says_so(monkeypatch):
    """The same kernel is right for one GPU, too large for another, and larger than what its row says."""
    compiled = pytest.importorskip("needlework.ops.runtime.compile")
    (task, *_) = (
        task for task in builds.tasks(False, ["sm_100"]) if task.engine == "paged/paged" and task.config == "sm90-d128"
    )
    case = next(iter(_cases(task)))
    made = compiled.compile_case(case, TARGETS["sm_100"])
    assert 0 < made.shared <= 232448
    small = TARGETS["sm_89"]._replace(arch=(10, 0), shared=made.shared - 1)
    with pytest.raises(
        MemoryError, match=f"{made.kernel} wants {made.shared:,} bytes of shared memory, sm_89 has {made.shared - 1:,}"
    ):
        compiled.compile_case(case, small)
    row = _row(task)
    assert builds._more_than_said(row, made) == ""
    said = row._replace(shared_memory=made.shared - 1)
    assert f"{made.shared:,} bytes of shared memory, its row says {made.shared - 1:,}" in builds._more_than_said(said, made)


def test_a_kernel_that_wants_more_than_the_gpu_has_is_named_with_both():
    launcher = pytest.importorskip("needlework.ops.runtime.launcher")

    def refused(*_, **__):
        raise launcher.OutOfResources(164864, 101376, "shared memory")

    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: refused, "__name__": "attend"})()
    with pytest.raises(RuntimeError, match="attend wants 164,864 of shared memory, this GPU has 101,376"):
        launcher.launch(kernel, (1,), (), {})


def _row(task):
    return next(row for row in launch_configs.rows(task.engine) if row.name == task.config)


def _cases(task):
    module = importlib.import_module(f"needlework.ops.{task.file}")
    return module.compile_cases(_row(task), getattr(torch, task.dtype), task.K, task.V)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_every_engine_compiles_for_every_gpu_under_the_row_that_is_picked_there(target):
    triton = pytest.importorskip("triton")
    if TARGETS[target].amd and "amd" not in triton.backends.backends:
        pytest.skip("this Triton has no backend for AMD's GPUs")
    todo = builds.tasks(False, [target])
    # PyTorch computes PaTH's wider heads, the scalar engine wider keys of additive rules
    widest = {"delta/additive": 128, "path/engine": 64 if TARGETS[target].amd else 128, "path/step": 128}
    picked = {
        (engine, launch_configs._picked(engine, TARGETS[target].arch, "bfloat16", *size, frozenset()).name)
        for engine in targets.ENGINES
        for size in ((64, 64), (128, 128), (256, 256))
        if size[0] <= widest.get(engine, 256)
    }
    found = [task for task in todo if (task.engine, task.config) in picked]
    assert {task.engine for task in found} == set(targets.ENGINES)
    assert [build for build in builds.compiled([task._replace(variants=False) for task in found]) if build.error] == []


def test_a_launch_for_amds_gpus_has_nothing_that_only_nvidias_compiler_takes():
    given = {
        "PREC": "tf32x3",
        "OTHER": "ieee",
        "ASM": 1,
        "PDL": 1,
        "BV": 32,
        "num_warps": 4,
        "maxnreg": 128,
        "launch_pdl": True,
    }
    assert for_amd(given) == {"PREC": "ieee", "OTHER": "ieee", "ASM": 0, "PDL": 0, "BV": 32, "num_warps": 4}
    assert for_amd({"BV": 32}) == {"BV": 32}
    assert {row.name for task in builds.tasks(False, ["gfx942"]) for row in [_row(task)] if row.arch > (1, 0)} == set()


def test_a_target_is_for_compiling_alone(needlework):
    assert "sm_80, sm_89, sm_90, sm_100, gfx942" in needlework("doctor", "--compile-only", "--target", "sm_75", ok=False)
    assert "--target: is for --compile-only" in needlework("doctor", "--target", "sm_80", ok=False)


def test_it_knows_the_tools_that_miscompile():
    assert "ptxas 12.8.93" in doctor.warning({"triton": "3.6.0", "ptxas": "12.8.93"}, (9, 0))
    assert doctor.warning({"triton": "3.6.0", "ptxas": "13.4.59"}, (9, 0)) is None
    assert doctor.warning({"triton": "3.7.1", "ptxas": "12.8.93"}, (9, 0)) is None
    assert doctor.warning({"triton": "3.6.0", "ptxas": "12.8.93"}, (8, 0)) is None
