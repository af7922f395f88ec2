"""What benchmarks/ runs on a GPU, run on tiny shapes: every case is right by the budget, and the tuner tunes."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from needlework.testing.rows import chosen

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the Triton interpreter")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"B": 1, "T": 20, "H": 2, "K": 16, "V": 16}
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch):
    """A module of benchmarks/, every shape a tiny one."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    cases = importlib.import_module("cases")
    monkeypatch.setattr(cases, "SHAPES", dict.fromkeys(cases.SHAPES, TINY))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


RULES = ("gated", "qdelta", "additive", "gla", "kda", "gdn2", "given", "carve-gates-given", "carve", "ccq", "mamba3", "lucid",
         "lucid/attention", "polar")  # fmt: skip
KEYS = ("gated/A", "qdelta/C", "kda/B", "carve-gates-given/B", "carve/B", "ccq/K256", "ccq+gated/A", "mamba3/64-heads",
        "lucid/kv4-8K", "lucid/clustered/kv4-8K", "lucid/kv4-d128", "lucid/attention/kv4-32K", "polar/2K", "path/kv8-4K", "path/lucid/kv8-4K")  # fmt: skip


def case_of(bench, key):
    return next(case for case in bench("cases").CASES + bench("attention_cases").CASES if case.key == key)


@pytest.mark.parametrize(
    "key", chosen(KEYS, quick=["kda/B", "ccq+gated/A", "lucid/kv4-d128", "carve-gates-given/B", "mamba3/64-heads"])
)
def test_a_case_is_within_its_budget_or_has_no_kernel(bench, key):
    try:
        # of 20 tokens a parameter's gradient may be a difference of few terms, and its error one draw
        ratio, name = bench("judge").judge(case_of(bench, key), CPU, torch.float32, T=40)
    except ValueError as error:
        assert "no Triton kernel" in str(error)
        pytest.skip(str(error))
    assert ratio <= 1, f"{name}: {ratio:.2f} x its budget"


def test_a_wrong_kernel_is_over_its_budget(bench):
    from dataclasses import replace

    case = case_of(bench, "gated/A")
    spec = replace(case.spec, chunk=lambda beta, **x: case.spec.chunk(beta=beta * 1.001, **x))
    assert bench("judge").judge(replace(case, spec=spec), CPU, torch.float32, T=20)[0] > 1


@pytest.mark.parametrize("op", ["gated", "qdelta", "kda", "carve", "ccq", "mamba3"])
def test_a_step_is_within_its_budget(bench, op, monkeypatch):
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    step = next(step for step in bench("steps").steps() if step.op == op)
    assert step.judge(CPU, K=16, V=16) <= 1


@pytest.mark.parametrize("op", ("polar/decode", "paged/softmax", "paged/differential"))
def test_decode_on_pages_is_within_its_budget(bench, op):
    step = next(step for step in bench("steps").steps() if step.op == op)
    assert step.judge(CPU, torch.float32, T=60, K=16, V=16) <= 1


def test_a_run_writes_a_row_of_every_kind_and_none_of_a_case_that_is_wrong(bench, monkeypatch, tmp_path):
    """On a CPU, with a clock that knows the answers."""
    run, steps, results = bench("run"), bench("steps"), bench("results")
    monkeypatch.setenv("NEEDLEWORK_IMPL", "triton")
    monkeypatch.setattr(steps, "SHAPE", TINY)
    monkeypatch.setattr(steps, "replay", lambda call: call)
    monkeypatch.setattr(steps, "median", lambda call: call() is None or 2.0)
    wrong = lambda case, *_: (2.0, "o") if case.op == "qdelta" else (0.5, "o")
    fakes = {"DEVICE": "cpu", "DTYPE": torch.float32, "judge": wrong, "warm": lambda cases: [], "cold": lambda *_: 3e3,
             "median": lambda call: call() is None or 2.0, "peak": lambda call: 1.0, "ceilings": lambda: (4e12, 7e14)}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(run, name, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device")
    file = results.path("A Device", tmp_path)
    results.put(file, {"op": "qdelta", "shape": TINY, "dtype": "float32", "pass": "fwd"})
    monkeypatch.setattr(
        sys, "argv",
        ["run.py", "--only", "gated/A", "qdelta/A", "lucid/kv4-d128", "step/carve", "cold/gated", "--out", str(tmp_path)],
    )  # fmt: skip
    assert run.main() == 1
    rows = {(row["op"], row["pass"]): row for row in results.read(file)}
    every = {("gated", "fwd"), ("gated", "fwd+bwd"), ("gated", "cold"), ("carve", "step")}
    assert set(rows) == every | {("lucid", "fwd"), ("lucid", "fwd+bwd"), ("lucid", "share")}
    keys = "op impl shape dtype pass ms peak_mib peer peer_ms ratio floor_ms bar error_over_budget device torch triton commit"
    assert all(set(keys.split()) <= set(row) for row in rows.values())
    assert rows["gated", "fwd"]["ms"] == 2.0 and rows["gated", "fwd"]["bar"] == 0.5
    share = rows["lucid", "share"]
    assert share["ratio"] == share["floor_ms"] / 2.0 and share["bar"] == 0.42 and rows["lucid", "fwd"]["peer_ms"] is None


@pytest.mark.parametrize("rule", chosen(RULES, quick=["qdelta"]))
def test_a_drawn_call_is_within_its_budget_packed_and_from_a_state(bench, rule, monkeypatch):
    draw, grid = bench("draw"), bench("grid")
    for name, value in {"DEVICE": "cpu", "DRAWS": 4, "JUDGED": {"T": 40, "documents": (1, 14, 25)}}.items():
        monkeypatch.setattr(grid, name, value)
    (call,), _ = draw.draw(draw.rule_of(rule), 101, 1)
    call = call._replace(K=32, V=32 if rule == "ccq" else 16, dtype="float32", state=draw.rule_of(rule).state)
    for documents in ((), (40,)):
        error, name = grid.judge(call._replace(documents=documents))
        assert error <= 1, f"{name}: {error:.2f} x its budget"


def test_the_tuner_takes_the_fastest_that_is_right_and_writes_it(bench, tmp_path):
    """A timer that likes BV = 16 in the scan, and num_warps = 8, which counts as wrong there; a stage more does not compile."""
    tune, launch_configs = bench("tune"), importlib.import_module("needlework.ops.runtime.launch_configs")
    case, engine = case_of(bench, "gated/A"), "delta/scalar"
    now = lambda: launch_configs.launch_config(engine, CPU, torch.float32, 16, 16).launch["scan"]
    judged = []

    def timer(call):
        if now()["NS"] > 1:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 + 0.1 * (now()["BV"] > 16) - 0.5 * (now()["num_warps"] == 8)

    def verdict(case, row, device, dtype):
        judged.append(dict(now()))
        return "o 2.00" if now()["num_warps"] == 8 else ""

    row, best, before, after = tune.tune(case, CPU, torch.float32, timer=timer, verdict=verdict)
    assert best == {"scan": {"BV": 16}} and after < before
    assert all(own["BV"] == 16 or own["num_warps"] == 8 for own in judged), "what is no faster is not judged"
    assert tune.tune(case, CPU, torch.float32, seconds=0, timer=timer, verdict=verdict)[1] == {}

    (tmp_path / "delta").mkdir()
    table = tmp_path / "delta" / "scalar.launch.json"
    before = (Path(launch_configs.__file__).parents[1] / "delta" / "scalar.launch.json").read_text()
    table.write_text(before)
    tune.write(row, best, "measured here", tmp_path)
    entry = next(entry for entry in json.loads(table.read_text()) if entry["name"] == row.name)
    assert entry["launch"]["scan"]["BV"] == 16 and entry["measured"] == "measured here"
    changed = set(table.read_text().splitlines()) - set(before.splitlines())
    assert len(changed) == 3, "the kernel's line, the new one, and a comma before it"


def test_a_gain_that_does_not_come_again_is_not_taken(bench):
    tune = bench("tune")
    luck = iter([0.5, 1.0])
    timer = lambda call: next(luck, 1.0)
    assert tune.tune(case_of(bench, "gated/A"), CPU, torch.float32, timer=timer, verdict=lambda *_: "")[1] == {}


def test_the_tuner_asks_the_doctor(bench, monkeypatch):
    tune, launch_configs = bench("tune"), importlib.import_module("needlework.ops.runtime.launch_configs")
    asked = []
    monkeypatch.setattr(
        tune, "weigh", lambda task, form, device: asked.append((task, form)) or ({}, ("dk 1.20",) * (form == "long"))
    )
    row = launch_configs.launch_config("delta/scalar", CPU, torch.float32, 16, 16)
    assert tune.wrong(case_of(bench, "gated/A"), row, CPU, torch.float32) == "dk 1.20"
    assert [form for _, form in asked] == ["short", "long"]
    assert asked[0][0][:6] == ("delta/gated", "delta/scalar", row.name, "float32", 16, 16)


def test_every_tuned_engine_has_a_table(bench):
    from needlework.ops.runtime.launch_configs import rows

    tune = bench("tune")
    assert all(rows(engine) for engine in tune.ENGINES.values())
    assert set(tune.ENGINES) <= {case.op for case in tune.CASES}


def test_a_table_is_printed_as_it_lies(bench):
    from needlework.ops.runtime import launch_configs

    for path in Path(launch_configs.__file__).parents[1].glob("*/*.launch.json"):
        assert bench("tune").printed(json.loads(path.read_text())) == path.read_text(), path
