"""Drawn calls: the draw covers what it says, every call is one that its op takes, and the report says what the rows hold."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from needlework.ops.runtime.launch_configs import rows
from needlework.ops.runtime.target import TARGETS


def test_a_draw_is_that_of_its_seed_and_covers_the_ranges(bench):
    draw = bench("draw")
    assert not {*draw.TUNING} & {*draw.REPORTING}
    for rule in draw.RULES:
        calls, left_out = draw.draw(rule, 101)
        assert (calls, left_out) == draw.draw(rule, 101)
        assert not {call.T for call in calls} >= {call.T for call in draw.draw(rule, 102)[0]}
        assert len(calls) == 40 == len({call.name for call in calls}) and not any(map(draw.too_large, calls))
        assert all("more than" in reason for reason in left_out.values())
        every = [*calls, *left_out]
        assert len({call.index for call in every}) == len(every)
        assert {call.K for call in every} == {K for K in draw.KEYS if K <= rule.widest[0]}
        if rule.values and not rule.attends:
            assert {call.V for call in every} == {V for V in draw.VALUES if V <= rule.widest[1]}
        sizes = [sum(call.sequences) for call in every]
        assert 2048 <= min(sizes) < 2500 and 200_000 < max(sizes) <= 262_144
        heads = [call.HV for call in every]
        assert 1 <= min(heads) < 3 and 55 < max(heads) <= 64 and all(call.HV % call.H == 0 for call in every)
        assert {call.dtype for call in calls} == {"bfloat16", "float16"}
        assert {call.HV // call.H for call in every} == ({1, 2, 4, 8} if rule.grouped else {1})
        assert {call.state for call in calls} == ({False, True} if rule.state else {False})
        packed, rows = ([call for call in calls if bool(call.documents) is kind] for kind in (True, False))
        assert len(packed) >= 10 and {call.B for call in packed} == {1}
        assert all(sum(call.documents) == call.T == call.packed()[-1] for call in packed)
        lengths = [length for call in packed for length in call.documents]
        assert min(lengths) < 64 and max(lengths) > 10_000
        assert any(call.T % 64 for call in rows) and any(call.T % 64 == 0 for call in rows)
        assert min(call.B for call in every) == 1 and max(call.B for call in every) > 32


def test_a_cut_draw_has_every_rule(bench):
    draw = bench("draw")
    calls, _ = draw.drawn(101)
    assert [call.rule for call in calls[: len(draw.RULES)]] == [rule.name for rule in draw.RULES]
    assert calls[len(draw.RULES)] == draw.draw(draw.RULES[0], 101)[0][1]


def test_what_takes_more_memory_or_time_than_there_is_is_left_out_with_its_reason(bench):
    draw = bench("draw")
    call = draw.Call("gated", 1, 0, B=1, T=262144, H=64, HV=64, K=256, V=512, dtype="bfloat16")
    assert draw.too_large(call) == "takes about 576 GiB, more than 70"
    assert draw.too_large(call._replace(T=2048)) is None
    states = draw.memory(call._replace(T=2048, B=64, state=True)) - draw.memory(call._replace(T=2048, B=64))
    assert states == 16 * 64 * 64 * 256 * 512
    attends = draw.Call("polar", 1, 0, B=1, T=262144, H=1, HV=8, K=128, V=128, dtype="bfloat16")
    assert "operations" in draw.too_large(attends)
    assert draw.too_large(attends._replace(documents=(1024,) * 256)) is None


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_every_drawn_size_has_a_launch_config_on_every_gpu(bench, target):
    draw, drawn = bench("draw"), bench("drawn")
    assert [rule.name for rule in draw.RULES] == list(drawn.PARTS)
    for rule in draw.RULES:
        for call in draw.draw(rule, 101)[0]:
            facts = TARGETS[target].arch, call.dtype, call.K, call.V
            assert any(row.misfit(*facts) is None for row in rows(drawn.PARTS[rule.name].engine)), (call, target)


def accepted(bench, rule, count):
    """Small calls by the torch form, each with its peer's inputs."""
    draw, drawn = bench("draw"), bench("drawn")
    calls, _ = draw.draw(draw.rule_of(rule), 101, count, tokens=(24, 96), heads=(1, 4))
    for call in calls:
        case = drawn.case_of(call, "cpu")
        x = case.drawn("cpu")
        assert any(name.startswith("initial_state") for name in x) is call.state
        with torch.no_grad():
            o = case.spec.chunk(**x, impl="torch")[0]
        assert o.isfinite().all() and o.shape[:2] == (call.B, call.T), call
        width = {"ccq": call.K}.get(rule, call.V)
        assert o.shape[2:] == (call.HV, width) and o.dtype == getattr(torch, call.dtype)
        if case.peer is not None:
            theirs = case.peer_inputs(x)
            assert ("initial_state" in theirs) is call.state
            assert all(
                y.shape[2] == call.HV
                for name, y in theirs.items()
                if name == "q" and rule not in ("gated", "kda", "carve-gates-given")
            )


RULES = ("gated", "qdelta", "additive", "gla", "kda", "gdn2", "given", "carve-gates-given", "carve", "ccq", "mamba3", "lucid",
         "lucid/attention", "polar")  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_call_is_one_that_the_op_takes(bench, rule):
    accepted(bench, rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_drawn_call_is_one_that_the_op_takes(bench, rule):
    accepted(bench, rule, 40)


def drawn_row(index, ratio, op="gated", **changed):
    shape = {"B": 1, "T": 3000, "H": 4, "HV": 4, "K": 96, "V": 192, "documents": 0, "state": 0}
    times = {"ms": ratio, "peer_ms": 1.0, "graph_ms": ratio and 2 * ratio, "peer_graph_ms": 1.0, "peer_why": "", "why": None}
    about = {
        "seed": 101,
        "index": index,
        "error_over_budget": 0.4,
        "device": "D 1",
        "torch": "2",
        "triton": "3",
        "commit": "abc",
    }
    return {"op": op, "shape": shape, "dtype": "float16", "pass": "fwd", **times, **about} | changed


def test_the_report_of_drawn_calls_says_how_their_ratios_are_distributed(bench):
    distribution = bench("distribution")
    rows = [drawn_row(i, (i + 1) / 20) for i in range(20)]
    assert distribution.summary([row["ms"] for row in rows]) == {"median": 0.525, "90 %": 0.9, "worst": 1.0}
    rows += [drawn_row(20, 0.5, "polar", peer_ms=None, peer_graph_ms=None, peer_why="no head of 96")]
    rows += [drawn_row(21, None, "polar", why="WRONG: dk", error_over_budget=3.0, peer_ms=None)]
    text = distribution.section(rows)
    line = lambda start: next(line for line in text if line.startswith(start))
    assert line("| gated | fwd |") == "| gated | fwd | 20 | 20 | 0.53 | 0.90 | 1.00 | 1.05 | 1.80 | 2.00 |"
    assert line("| polar | fwd |") == "| polar | fwd | 1 | 0 |  |  |  |  |  |  |"
    met = "0.53, 0.6 met | 0.90, 0.8 NOT met | 1.00, 1.0 met | 1.05, 0.6 NOT met | 1.80, 0.8 NOT met | 2.00, 1.0 NOT met"
    assert line("| all | fwd |") == f"| all | fwd | 21 | 20 | {met} |"
    named = [row.split(" | ")[0] for row in text if row.startswith("| gated/")]
    assert named == [f"| gated/101-{i}" for i in range(19, 9, -1)]
    assert "22 calls of seed 101, 1 over the error budget" in text[0]
    assert "- polar/101-21: WRONG: dk" in text and "- polar: its peer did not run for 1 calls: no head of 96" in text


def test_calls_that_plans_were_made_on_are_not_reported(bench, tmp_path):
    distribution = bench("distribution")
    tuned = [drawn_row(0, 0.1, seed=bench("draw").TUNING[0])]
    assert distribution.page(tuned) == []
    assert not any("svg" in line for line in distribution.page([drawn_row(1, 0.5, peer_ms=None)]))
    text = distribution.page([*tuned, drawn_row(1, 0.5)])
    assert text[0].endswith("](figures/grid-d-1.svg)") and "| gated | fwd | 1 | 1 | 0.50 |" in "\n".join(text)
    (tmp_path / "figures").mkdir()
    distribution.picture([*tuned, drawn_row(1, 0.5)], tmp_path)
    assert "gated fwd" in (tmp_path / "figures" / "grid-d-1.svg").read_text()


def test_what_a_child_did_not_say_is_said_for_it(bench, monkeypatch):
    """One that ends early names the call at which it did; one that gave its own reason is believed."""
    draw, children = bench("draw"), bench("children")
    calls = draw.draw(draw.RULES[0], 101, 3)[0]
    says = lambda call, why=None: json.dumps({"name": call.name, "found": {"fwd": 1}, "why": why}) + "\n"

    def heard(output, late=False):
        def run(command, timeout, **_):
            assert [draw.Call.of(json.loads(text)) for text in command[4:]] == calls and command[2:4] == ["--act", "time"]
            if late:
                raise subprocess.TimeoutExpired(command, timeout, output.encode())
            return SimpleNamespace(stdout=output, stderr="Segmentation fault", returncode=1)

        monkeypatch.setattr(children.subprocess, "run", run)
        return list(children.answers_of(Path("grid.py"), "time", calls, {"time": 100}))

    a, b, c = calls
    assert heard("loading\n" + says(a) + says(b) + says(c)) == [(call, {"fwd": 1}, None) for call in calls]
    assert heard(says(a) + says(b, "no memory")) == [(a, {"fwd": 1}, None), (b, {"fwd": 1}, "no memory")]
    assert heard(says(a)) == [(a, {"fwd": 1}, None), (b, {}, "its process ended: Segmentation fault")]
    assert heard("", late=True) == [(a, {}, "did not end in 300 s")]


def test_a_child_says_what_it_finds_and_ends_at_an_error(bench, monkeypatch, capsys):
    draw, children = bench("draw"), bench("children")
    calls = draw.draw(draw.RULES[0], 101, 3)[0]

    def act(call, found):
        found["T"] = call.T
        if call == calls[1]:
            raise RuntimeError("an illegal access\nCUDA error")

    children.answer({"time": act})  # no child: nothing happens
    monkeypatch.setattr(sys, "argv", ["grid.py", "--act", "time", *(json.dumps(call._asdict()) for call in calls)])
    with pytest.raises(SystemExit) as ended:
        children.answer({"time": act})
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"name": calls[0].name, "found": {"T": calls[0].T}, "why": None}
    assert second["found"] == {"T": calls[1].T} and second["why"] == "RuntimeError: CUDA error" and ended.value.code == 1


def test_what_is_judged_and_compiled_beside_others_is_small_and_of_the_same_kernels(bench):
    draw, grid = bench("draw"), bench("grid")
    for rule in draw.RULES:
        for call in draw.draw(rule, 101)[0]:
            judged, short = grid.small(call), grid.shorter(call)
            assert draw.memory(short) <= grid.PREPARED and judged.B == 1 and sum(judged.sequences) == 136
            for other in (judged, short):
                same = ("K", "V", "dtype", "state")
                assert all(getattr(other, name) == getattr(call, name) for name in same)
                assert other.HV // other.H == call.HV // call.H and bool(other.documents) is bool(call.documents)
            assert short.H == call.H and (call.documents or (short.T - call.T) % 64 == 0)


@pytest.fixture
def grid(bench, monkeypatch):
    """benchmarks/grid.py on a CPU with a clock that knows the answer, its processes this one; few tokens, by the torch form."""
    grid, draw = bench("grid"), bench("draw")
    clock = lambda call: 2.0 if call() is not None else 0.0
    fakes = {"DEVICE": "cpu", "median": clock, "peak": clock, "replay": lambda call: call, "judge": lambda call: (0.5, "o")}
    for name, fake in fakes.items():
        monkeypatch.setattr(grid, name, fake)
    small = partial(draw.draw, tokens=(24, 48), heads=(1, 2))
    case_of = grid.case_of

    def by_torch(call, device):
        case = case_of(call, device)
        return replace(case, spec=replace(case.spec, chunk=partial(case.spec.chunk, impl="torch")))

    def answers_of(script, act, calls, limits):
        for call in calls:
            found, reason = {}, None
            try:
                grid.ACTS[act](call, found)
            except Exception as error:
                reason = grid.why(error)
            yield call, found, reason
            if reason:
                return

    monkeypatch.setattr(draw, "draw", small)
    monkeypatch.setattr(grid, "case_of", by_torch)
    monkeypatch.setattr(grid, "answers_of", answers_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device")
    return grid


def test_a_grid_judges_times_and_reports_its_calls_and_goes_on_where_it_stopped(grid, bench, monkeypatch, tmp_path, capsys):
    """One rule is right, one is wrong, one cannot be captured; none of the peers is installed."""
    pytest.importorskip("triton")
    results, file, now = bench("results"), tmp_path / "grid.json", []
    case_of = grid.case_of

    def breaks(call):
        if now == ["polar"]:
            raise RuntimeError("capturing stream has unjoined work")
        return call

    def noted(call, device):
        now[:] = [call.rule]
        return case_of(call, device)

    monkeypatch.setattr(grid, "replay", breaks)
    monkeypatch.setattr(grid, "case_of", noted)
    monkeypatch.setattr(grid, "judge", lambda call: (3.0, "dk") if call.rule == "additive" else (0.5, "o"))
    arguments = ["grid.py", "--rules", "gated", "additive", "polar", "--calls", "2", "--out", str(file), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "0"])
    assert grid.main() == 0 and results.read(file) == []
    monkeypatch.setattr(sys, "argv", arguments)
    assert grid.main() == 0
    rows = {(row["op"], row["index"], row["pass"]): row for row in results.read(file)}
    assert set(rows) == {(op, i, name) for op in ("gated", "additive", "polar") for i in (0, 1) for name in ("fwd", "fwd+bwd")}
    gated, additive, polar = (rows[op, 0, "fwd+bwd"] for op in ("gated", "additive", "polar"))
    # packed lengths are read on the host: no capture
    assert {(row["graph_ms"], bool(row["shape"]["documents"])) for row in rows.values() if row["op"] == "gated"} == {
        (2.0, False),
        (None, True),
    }
    assert gated["ms"] == 2.0 and gated["error_over_budget"] == 0.5 and gated["why"] is None
    assert "ModuleNotFoundError" in gated["peer_why"] and gated["peer_ms"] is None and "gated_delta" in gated["peer"]
    assert additive["why"] == "WRONG: the error of dk is 3.00 × its budget" and additive["ms"] is None
    assert polar["ms"] == 2.0 and polar["graph_ms"] is None and "graph_ms of fwd: RuntimeError: capturing" in polar["why"]
    assert "| gated | fwd+bwd | 2 | 0 |" in capsys.readouterr().out
    monkeypatch.setattr(grid, "answers_of", lambda *_: pytest.fail("all of them have rows"))
    assert grid.main() == 0


def test_the_literal_attention_on_solved_values_stays_in_its_document(bench):
    """Each document alone gives what it gives packed."""
    attention = bench("attention_cases")
    x = attention.lucid_inputs(torch.Generator().manual_seed(0), 1, 30, 1, 8, 8, queries=2)
    form = partial(attention.read_by_softmax, attention.spec_of("lucid").recurrent)
    packed = form(**x, cu_seqlens=torch.tensor([0, 12, 30]))[0]
    alone = [form(**{name: y[:, a:b] for name, y in x.items()})[0] for a, b in ((0, 12), (12, 30))]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-12, atol=1e-12)
