"""How the launch tables are tried at shapes that were not timed: which launch configs are tried, and that the best is the fastest that is
right."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from needlework.ops.runtime import launch_configs

BV, NP, WARPS = {"scan": {"BV": 16}}, {"scan": {"NP": 264}}, {"gate": {"num_warps": 2}}


@pytest.fixture
def held_out(bench):
    pytest.importorskip("triton")
    return bench("held_out")


def test_every_constant_is_moved_to_its_neighbours_one_at_a_time(held_out):
    row = SimpleNamespace(
        engine="delta/scalar",
        name="plain",
        launch={"shared": {"C": 16, "NP": 132}, "scan": {"BV": 32, "NP": 132, "C2": 3}, "gate": {"num_warps": 1}},
    )
    assert held_out.moves(row) == [{"scan": {"BV": 16}}, {"scan": {"BV": 64}}, {"scan": {"NP": 264}}, WARPS]


def test_moves_that_end_the_process_are_neighbours_of_rows_and_not_tried(held_out):
    for (engine, name), trial in held_out.FATAL.items():
        (row,) = (row for row in launch_configs.rows(engine) if row.name == name)
        assert trial not in held_out.moves(row) and trial in held_out.moves(row._replace(name="another"))


def test_the_best_move_of_each_kernel_is_tried_with_those_of_the_others(held_out):
    times = [(0.9, BV), (0.8, NP), (0.95, WARPS), (1.2, {"sums": {"BD": 64}})]
    assert held_out.together(times, 1.0) == {"scan": {"NP": 264}, "gate": {"num_warps": 2}}
    assert held_out.together(times, 0.7) == {}


@pytest.mark.parametrize(
    "wrong, best, ms", [((), NP | WARPS, 0.76), ((NP | WARPS,), NP, 0.8), ((NP | WARPS, NP, BV, WARPS), {}, 1.0)]
)
def test_what_is_best_is_the_fastest_that_is_right(held_out, bench, monkeypatch, wrong, best, ms):
    gains = {"BV": 0.9, "NP": 0.8, "num_warps": 0.95}

    class Shape:
        engine, row = "delta/scalar", SimpleNamespace(name="plain", launch={})

        def __init__(self, call):
            self.call = {}

        def under(self, trial):
            now.update(trial=trial)
            return nullcontext()

        def clocked(self):
            return 1.0

        def timed(self, trial):
            if trial == {"scan": {"KS": 64}}:
                return None  # does not compile
            found = 1.0
            for constants in trial.values():
                for name in constants:
                    found *= gains[name]
            return found

    now = {}
    fakes = {"Shape": Shape, "moves": lambda row: [BV, NP, WARPS, {"scan": {"KS": 64}}],
             "judge": lambda call: (2.0 if now["trial"] in wrong else 0.5, "o")}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(held_out, name, fake)
    (call,), _ = bench("draw").draw(bench("draw").RULES[0], 21, 1)
    found = {}
    held_out.weighed(call, found)
    assert found["constants"] == best and found["ms"] == pytest.approx(ms) and found["ratio"] == pytest.approx(1 / ms)
    assert (found["picked"], found["config"]) == (1.0, "plain")


def test_every_candidate_is_compiled_and_those_that_are_not_are_counted(held_out, monkeypatch):
    tried = []

    class Shape:
        row = None

        def __init__(self, call):
            self.call = lambda: None

        def under(self, trial):
            tried.append(trial)
            if trial == 5:
                raise RuntimeError("out of shared memory")
            return nullcontext()

    monkeypatch.setattr(held_out, "Shape", Shape)
    monkeypatch.setattr(held_out, "moves", lambda row: list(range(8)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = {}
    held_out.compiled(None, found)
    assert tried == list(range(8)) and found == {"failed": 1}


@pytest.mark.parametrize("captured", [False, True])
def test_what_can_be_captured_is_timed_in_a_graph(held_out, monkeypatch, captured):
    monkeypatch.setattr(held_out, "replay", lambda call: f"graph of {call}")
    monkeypatch.setattr(held_out, "clock", lambda call: call)
    shape = SimpleNamespace(call="call", captured=captured)
    assert held_out.Shape.clocked(shape) == ("graph of call" if captured else "call")


def test_a_run_says_how_far_from_the_best_the_picked_configs_are(held_out, bench, monkeypatch, tmp_path, capsys):
    acts = []

    def answers_of(script, act, calls, limits):
        for i, call in enumerate(calls):
            acts.append(act)
            if act == "weigh" and (call.rule, call.index) == ("gated", 1):
                yield call, {}, "no memory"
                return
            yield call, {"failed": 0} if act == "compile" else {"ratio": 1.0 + 0.1 * i, "ms": 2.0, "config": "plain"}, None

    monkeypatch.setattr(held_out, "answers_of", answers_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device")
    monkeypatch.setattr(launch_configs, "capability", lambda device: (9, 0))
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["held_out.py", "--rules", "gated", "kda", "--calls", "4", "--out", str(file)])
    assert held_out.main() == 0
    rows = bench("results").read(file)
    assert acts == ["compile"] * 8 + ["weigh"] * 8  # nothing is timed beside a compiler
    assert [row["ratio"] for row in rows] == [1.0, 1.0, 1.1, 1.0, 1.1, 1.2, 1.3]
    assert [row["op"] for row in rows] == ["gated"] * 3 + ["kda"] * 4
    *_, gated, kda = bench("table").held_out(rows)
    assert gated.startswith("| gated | 3 | 1.00 | 1.10 | 1.15 met |") and kda.startswith(
        "| kda | 4 | 1.15 | 1.30 | 1.15 NOT met |"
    )
    said = capsys.readouterr().out
    assert "gated: picked ÷ best found of 3 shapes: median 1.00, worst 1.10, bar 1.15 met" in said
    assert "kda: picked ÷ best found of 4 shapes: median 1.15, worst 1.30, bar 1.15 NOT met" in said
    assert "NOT met" in held_out.summary("gated", [1.0, 1.2])


def test_held_out_shapes_are_of_a_seed_of_their_own(held_out, bench):
    draw, engine_of = bench("draw"), bench("drawn").engine_of
    assert draw.HELD_OUT not in (*draw.TUNING, *draw.REPORTING)
    for rule in held_out.RULES:
        calls = held_out.shapes(rule, draw.HELD_OUT, 10, (9, 0))
        assert len(calls) == 10 == len({call.name for call in calls})
        assert all(call.seed == draw.HELD_OUT and draw.memory(call) <= held_out.MEMORY for call in calls)
        assert {engine_of(call, (9, 0)) for call in calls} == {held_out.RULES[rule]}
