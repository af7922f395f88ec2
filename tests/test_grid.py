"""Drawn calls: the draw covers what it says, every call is one that its op takes, and the report says what the rows hold."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import chain
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
        assert {call.content for call in calls} == ({32, 64, 128} if rule.content else {0})
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
            engine = drawn.engine_of(call, TARGETS[target].arch)
            assert any(row.misfit(*facts) is None for row in rows(engine)), (call, target)


def test_an_additive_rule_whose_heads_share_keys_is_of_an_engine_of_its_own(bench):
    """Where that has a launch config, which it has not for float16 and K past 192."""
    draw, drawn = bench("draw"), bench("drawn")
    call = draw.Call("additive", 1, 0, B=1, T=64, H=1, HV=4, K=128, V=64, dtype="bfloat16")
    assert drawn.engine_of(call, (9, 0)) == "delta/additive"
    for other in ({"H": 4}, {"K": 200}, {"dtype": "float16"}, {"rule": "gated"}):
        assert drawn.engine_of(call._replace(**other), (9, 0)) == "delta/scalar", other


def test_mamba3s_peer_has_a_query_and_a_key_for_each_head(bench):
    """Of two groups of two heads each, with that head's bias."""
    cases = bench("cases")
    x = cases.mamba3_inputs(torch.Generator().manual_seed(0), 1, 5, 4, 8, 8, groups=2)
    theirs = cases.with_heads(x)
    assert theirs["q"].shape == (1, 5, 4, 8)
    torch.testing.assert_close(theirs["k"][:, :, 3], x["k"][:, :, 1] + x["k_bias"][3])


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
         "lucid/attention", "polar", "path", "path/fox", "path/lucid")  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_call_is_one_that_the_op_takes(bench, rule):
    accepted(bench, rule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_drawn_call_is_one_that_the_op_takes(bench, rule):
    accepted(bench, rule, 40)


def drawn_row(index, ratio, op="gated", **changed):
    shape = {"B": 1, "T": 3000, "H": 4, "HV": 4, "K": 96, "V": 192, "documents": 0, "state": 0, "content": 0}
    times = {"ms": ratio, "peer_ms": 1.0, "graph_ms": ratio and 2 * ratio, "peer_graph_ms": 1.0, "peer_why": "", "why": None}
    about = {
        "seed": 101,
        "index": index,
        "error_over_budget": 0.4,
        "device": "D 1",
        "torch": "2",
        "triton": "3",
        "commit": "abc",
        "calls": 40,
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
    assert line("| gated | fwd |") == "| gated | fwd | 20 | 20 | 0.53 | 0.90 | 1.00 | 1.05 | 1.80 | 2.00 | abc |"
    assert line("| polar | fwd |") == "| polar | fwd | 1 | 0 |  |  |  |  |  |  | abc |"
    met = "0.53, 0.6 met | 0.90, 0.8 NOT met | 1.00, 1.0 met | 1.05, 0.6 NOT met | 1.80, 0.8 NOT met | 2.00, 1.0 NOT met"
    assert line("| all | fwd |") == f"| all | fwd | 21 | 20 | {met} | abc |"
    named = [row.split(" | ")[0] for row in text if row.startswith("| gated/")]
    assert named == [f"| gated/101-{i}" for i in range(19, 9, -1)]
    draw = bench("draw")
    left_out = sum(len(draw.draw(rule, 101)[1]) for rule in draw.RULES)
    whole = f"22 of the {40 * len(draw.RULES)} calls of seed 101, 1 over the error budget. {left_out} calls that do not fit"
    assert whole in text[0]
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


def two_calls(folder):
    """Arguments of a run of two calls a rule, whose rows are kept in `folder`."""
    return "--calls", "2", "--out", str(folder / "grid.json"), "--commit", "abc"


@pytest.fixture
def heard(bench, tmp_path):
    """What is made of a child that says these lines, one for each call that it is given, and then waits or ends with an error."""
    draw, children = bench("draw"), bench("children")
    calls = draw.draw(draw.RULES[0], 101, 3)[0]

    def says(call, why=None):
        return json.dumps({"name": call.name, "found": {"fwd": 1}, "why": why})

    def heard(*lines, waits=False, limit=60, **more):
        script = tmp_path / "child.py"
        end = "time.sleep(60)" if waits else "sys.exit('Segmentation fault')"
        reads = "assert json.loads(sys.stdin.readline())['rule'] == 'gated'\n"
        said = "".join(f"{reads if line.startswith('{') else ''}print({line!r}, flush=True)\n" for line in lines)
        given = "assert sys.argv[1:] == ['--act', 'time']\n"
        script.write_text(f"import json, sys, time\n{given}{said}{end}\n")
        return list(children.answers_of(script, "time", calls, {"time": limit}, **more))

    return SimpleNamespace(calls=calls, says=says, of=heard)


def test_what_a_child_did_not_say_is_said_for_it(heard):
    """One that ends early names the call at which it did; one that gave its own reason is believed."""
    (a, b, c), says = heard.calls, heard.says
    every = [(call, {"fwd": 1}, None) for call in heard.calls]
    assert heard.of("loading", says(a), says(b), says(c)) == every
    assert heard.of(says(a), says(b, "no memory")) == [every[0], (b, {"fwd": 1}, "no memory")]
    assert heard.of(says(a)) == [every[0], (b, {}, "its process ended: Segmentation fault")]


def test_what_ended_a_process_is_the_last_error_that_it_names(bench):
    error_in = bench("children").error_in
    assert error_in("Traceback\n  File\nKeyError: 1\ntorch.AcceleratorError: CUDA error: illegal\nFor debugging\n") == (
        "torch.AcceleratorError: CUDA error: illegal"
    )
    assert error_in("Segmentation fault\n") == "Segmentation fault" and error_in("") == ""


def test_a_child_that_waits_is_ended_at_its_limit_and_nothing_is_said_of_a_call_that_the_run_has_no_time_for(heard):
    a, b, _ = heard.calls
    assert heard.of(heard.says(a), waits=True, limit=3) == [(a, {"fwd": 1}, None), (b, {}, "did not end in 3 s")]
    assert heard.of(heard.says(a), waits=True, until=time.monotonic() + 3) == [(a, {"fwd": 1}, None)]


def test_a_child_is_given_a_call_when_the_one_before_is_answered_and_one_that_ends_at_once_is_waited_for(bench, tmp_path):
    draw, children = bench("draw"), bench("children")
    calls, order = draw.draw(draw.RULES[0], 101, 3)[0], []
    given = lambda: (order.append(call.index) or call for call in calls)
    script = tmp_path / "child.py"
    answer = "print(json.dumps({'name': json.loads(line)['rule'], 'found': {}, 'why': None}), flush=True)"
    script.write_text(f"import json, sys\nfor line in sys.stdin:\n    {answer}\n")
    for call, _, _ in children.answers_of(script, "time", given(), {"time": 60}):
        order.append(-call.index)
    assert order == [sign * call.index for call in calls for sign in (1, -1)]
    script.write_text("")
    following = given()
    (ended,) = children.answers_of(script, "time", following, {"time": 60})
    assert ended[0] == calls[0] and ended[2] == "its process ended: " and next(following) == calls[1]


def test_children_are_stopped_while_a_call_is_timed_and_then_go_on(bench, tmp_path):
    children, call = bench("children"), bench("draw").draw(bench("draw").RULES[0], 101, 1)[0][0]
    running, script = children.Running(), tmp_path / "child.py"
    now = lambda what: os.waitid(os.P_PID, child.pid, what | os.WNOWAIT).si_code
    script.write_text(
        "import json, sys\nfor line in sys.stdin:\n    print(json.dumps({'name': 'a', 'found': {}, 'why': None}), flush=True)\n"
    )
    answers = children.answers_of(script, "prepare", [call, call], {"prepare": 60}, running=running)
    assert next(answers) == (call, {}, None)
    (child,) = running.children
    with running.stopped():
        assert now(os.WSTOPPED) == os.CLD_STOPPED and not running.lock.acquire(blocking=False)
    assert now(os.WCONTINUED) == os.CLD_CONTINUED
    assert list(answers) == [(call, {}, None)] and not running.children


def test_a_child_says_what_it_finds_and_ends_at_an_error(bench, monkeypatch, capsys):
    draw, children = bench("draw"), bench("children")
    calls = draw.draw(draw.RULES[0], 101, 3)[0]

    def act(call, found):
        found["T"] = call.T
        if call == calls[1]:
            raise RuntimeError("an illegal access\nCUDA error")

    children.answer({"time": act})  # no child: nothing happens
    monkeypatch.setattr(sys, "argv", ["grid.py", "--act", "time"])
    monkeypatch.setattr(sys, "stdin", [json.dumps(call._asdict()) for call in calls])
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
            assert draw.memory(short) <= grid.PREPARED or (short.B == 1 and short.T <= grid.SHORTEST)
            assert judged.B == 1 and sum(judged.sequences) == 136
            for other in (judged, short):
                same = ("K", "V", "dtype", "state")
                assert all(getattr(other, name) == getattr(call, name) for name in same)
                assert other.HV // other.H == call.HV // call.H and bool(other.documents) is bool(call.documents)
            assert short.H == call.H and (call.documents or (short.T - call.T) % 64 == 0)


def by_torch(case_of, factor=1.0):
    """Cases whose op is the torch form, with v larger by a factor."""

    def made(call, device):
        case = case_of(call, device)
        form = lambda v, **x: case.spec.chunk(v=factor * v, **x, impl="torch")
        return replace(case, spec=replace(case.spec, chunk=form))

    return made


@pytest.mark.parametrize("rule", ["gated", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("carve", "path"))])
def test_a_call_is_judged_at_its_sizes_and_documents_from_its_state(bench, monkeypatch, rule):
    draw, grid = bench("draw"), bench("grid")
    monkeypatch.setattr(grid, "DEVICE", "cpu")
    calls = draw.draw(draw.rule_of(rule), 101)[0]
    packed = (call for call in calls if call.documents and call.state is draw.rule_of(rule).state)
    call = min(packed, key=lambda call: call.K * call.V * call.HV // call.H)
    case_of = grid.case_of
    monkeypatch.setattr(grid, "case_of", by_torch(case_of))
    assert grid.judge(call)[0] <= 1
    monkeypatch.setattr(grid, "case_of", by_torch(case_of, 1.05))
    assert grid.judge(call)[0] > 1


@pytest.fixture
def grid(bench, monkeypatch):
    """benchmarks/grid.py on a CPU with a clock that knows the answer, its processes this one; few tokens, by the torch form."""
    pytest.importorskip("triton")
    grid, draw = bench("grid"), bench("draw")
    clock = lambda call: 2.0 if call() is not None else 0.0
    fakes = {"DEVICE": "cpu", "median": clock, "peak": clock, "replay": lambda call: call, "judge": lambda call: (0.5, "o"),
             "tuned_with": lambda benchmark: None, "SIDE_BY_SIDE": 1}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(grid, name, fake)
    small = partial(draw.draw, tokens=(24, 48), heads=(1, 2))

    def answers_of(script, act, calls, limits, until, running=None):
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
    monkeypatch.setattr(grid, "case_of", by_torch(grid.case_of))
    monkeypatch.setattr(grid, "answers_of", answers_of)
    monkeypatch.setattr("needlework.ops.runtime.precompile.compile_in", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device")
    return grid


def test_a_grid_judges_times_and_reports_its_calls_and_goes_on_where_it_stopped(grid, bench, monkeypatch, tmp_path, capsys):
    """One rule is right, one is wrong, one cannot be captured; none of the peers is installed."""
    results, file, now = bench("results"), tmp_path / "grid.json", []
    figures = grid.figures

    def breaks(call):
        if now == ["polar"]:
            raise RuntimeError("capturing stream has unjoined work")
        return call

    def noted(call, ready, found):
        now[:] = [call.rule]
        figures(call, ready, found)

    monkeypatch.setattr(grid, "replay", breaks)
    monkeypatch.setattr(grid, "figures", noted)
    monkeypatch.setattr(grid, "judge", lambda call: (3.0, "dk") if call.rule == "additive" else (0.5, "o"))
    arguments = [
        "grid.py",
        "--seed",
        "101",
        "--rules",
        "gated",
        "additive",
        "polar",
        "--calls",
        "2",
        "--out",
        str(file),
        "--commit",
        "abc",
    ]
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
    said = capsys.readouterr().out
    assert "| gated | fwd+bwd | 2 | 0 |" in said
    assert "gated/101-0: judging " in said and ", the peer " in said
    monkeypatch.setattr(grid, "answers_of", lambda *_: pytest.fail("all of them have rows"))
    assert grid.main() == 0


def test_calls_are_timed_again_alone_beside_the_figures_that_their_peers_had(grid, bench, monkeypatch, tmp_path, capsys):
    results, file = bench("results"), tmp_path / "grid.json"
    arguments = ["grid.py", "--seed", "101", "--rules", "gated", "--out", str(file), "--calls", "2", "--commit"]
    monkeypatch.setattr(sys, "argv", [*arguments, "abc"])
    assert grid.main() == 0
    first = results.read(file)[0]
    assert "ModuleNotFoundError" in first["peer_why"]
    theirs = {"peer_ms": 4.0, "peer_graph_ms": None, "peer_why": "", "prepare_s": 300.0, "time_s": 20.0}
    of_one_call = [row for row in results.read(file) if row["index"] == first["index"]]
    file.write_text(json.dumps(of_one_call))
    results.put(file, first | theirs)
    monkeypatch.setattr(grid, "median", lambda call: 1.0 if call() is not None else 0.0)
    case_of, asked = grid.case_of, SimpleNamespace(name="asked", load=lambda: pytest.fail("no peer is asked"))
    monkeypatch.setattr(grid, "case_of", lambda *given: replace(case_of(*given), peer=asked))
    monkeypatch.setattr(sys, "argv", [*arguments, "def", "--ours"])
    assert grid.main() == 0
    rows = {(row["index"], row["pass"]): row for row in results.read(file)}
    assert len(rows) == 4
    again = rows.pop((first["index"], first["pass"]))
    assert {name: again[name] for name in theirs} == theirs
    assert (again["ms"], again["commit"], again["peer_commit"]) == (1.0, "def", "abc")
    other = [row for (index, _), row in rows.items() if index != first["index"]]
    assert [(row["ms"], row["peer_ms"], row["peer_why"]) for row in other] == [(1.0, None, grid.NOT_ASKED)] * 2
    said = capsys.readouterr().out
    assert "The peers' figures of 1 calls are of an earlier run" in said
    assert f"its peer did not run for 1 calls: {grid.NOT_ASKED}" in said
    monkeypatch.setattr(sys, "argv", [*arguments, "ghi", "--ours"])
    assert grid.main() == 0
    own = [row for row in results.read(file) if row["index"] == first["index"]]
    assert {row["peer_commit"] for row in own} == {"abc"}, "the run that timed the peer, not the last one"


def test_a_call_timed_alone_is_left_to_a_run_that_asks_its_peer(grid, monkeypatch, tmp_path):
    """And says nothing of how long its peer takes."""
    arguments = ["grid.py", "--seed", "101", "--rules", "gated", *two_calls(tmp_path)]
    case_of, asked = grid.case_of, SimpleNamespace(name="asked", load=lambda: pytest.fail("no peer is asked"))
    monkeypatch.setattr(grid, "case_of", lambda *given: replace(case_of(*given), peer=asked))
    monkeypatch.setattr(sys, "argv", [*arguments, "--ours"])
    assert grid.main() == 0
    calls, _ = grid.drawn(101, tuple(rule for rule in grid.RULES if rule.name == "gated"), 2)
    run = grid.Run(tmp_path / "grid.json", "abc", 2)
    assert run.left(calls) == calls and run.seconds("prepare", "gated") == grid.GUESSED["prepare"]
    assert grid.Run(tmp_path / "grid.json", "abc", 2, ours=True).left(calls) == []


def test_what_prepares_is_stopped_while_figures_are_taken_and_not_while_a_peer_tunes_itself(grid, monkeypatch, tmp_path):
    stopped, running, of, figures = [], [], grid.Ready.of, grid.figures

    def heard(what):
        stopped.append((what, running[0].lock.locked()))

    monkeypatch.setattr(grid, "Running", lambda made=grid.Running: running.append(made()) or running[-1])
    monkeypatch.setattr(grid.Ready, "of", lambda *given: heard("tuning") or of(*given))
    monkeypatch.setattr(grid, "figures", lambda *given: heard("figures") or figures(*given))
    monkeypatch.setattr(
        sys,
        "argv",
        ["grid.py", "--seed", "101", "--rules", "gated", *two_calls(tmp_path)],
    )
    assert grid.main() == 0
    assert stopped == [("tuning", False), ("figures", True)] * 2


@pytest.fixture
def timed_in_minutes(grid, monkeypatch, tmp_path):
    """Runs of a grid whose calls take a minute to time and none to prepare, one after another, as what gets ready first is timed first; what calls
    each run timed, in order, by name."""
    now, timed, figures = [0.0], [], grid.figures

    def slowly(call, ready, found):
        figures(call, ready, found)
        now[0] += 60
        timed.append(call.name)

    monkeypatch.setattr(grid, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(grid, "figures", slowly)
    monkeypatch.setattr(grid, "GUESSED", {"prepare": 0.0, "time": 60.0})

    def run(minutes, *more):
        timed.clear()
        arguments = ["--rules", "gated", "polar", "path", *two_calls(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["grid.py", "--seed", "101", *arguments, "--minutes", str(minutes), *more])
        assert grid.main() == 0
        return [*timed]

    return run


def test_a_grid_in_pieces_is_the_whole_one_its_rules_in_turn(timed_in_minutes, bench, capsys):
    draw = bench("draw")
    calls, _ = draw.drawn(101, tuple(rule for rule in draw.RULES if rule.name in ("gated", "polar", "path")), 2)
    pieces = [timed_in_minutes(minutes) for minutes in (2, 3.5, 10, 10)]
    assert [len(piece) for piece in pieces] == [2, 3, 1, 0]
    assert [*chain(*pieces)] == [call.name for call in calls]
    assert [call.rule for call in calls] == ["gated", "polar", "path"] * 2
    assert f"6 of the {2 * len(draw.RULES)} calls of seed 101" in capsys.readouterr().out


def test_a_grid_says_before_what_it_takes_by_the_seconds_of_its_rows(timed_in_minutes, grid, monkeypatch, capsys):

    def said(minutes, *more):
        timed_in_minutes(minutes, *more)
        return capsys.readouterr().out

    monkeypatch.setattr(grid, "GUESSED", {"prepare": 600.0, "time": 150.0})
    monkeypatch.setattr(grid, "SIDE_BY_SIDE", 2)
    assert "6 calls: 60 minutes to prepare, by 2 processes at once, and 15 to time meanwhile: 30 minutes" in said(60, "--dry")
    monkeypatch.setattr(grid, "GUESSED", {"prepare": 60.0, "time": 150.0})
    assert "and 15 to time meanwhile: 15 minutes" in said(60, "--dry")
    monkeypatch.setattr(grid, "SIDE_BY_SIDE", 1)
    said(3.5)  # two are timed: no third is begun that would take longer than there is, by the guess
    text = said(60, "--dry")
    assert "gated: 1 calls, 0 s to prepare and 60 to time one\n" in text
    assert "path: 2 calls, 60 s to prepare and 150 to time one, by guess" in text
    # polar's is prepared while gated's is timed, or before: the minute that passes then may be its own
    polar = int(re.search(r"polar: 1 calls, (0|60) s to prepare", text)[1])
    assert f"4 calls: {2 + polar // 60} minutes to prepare" in text


def test_what_there_is_no_time_to_prepare_and_time_is_left(timed_in_minutes, grid, monkeypatch):
    prepared, judge = [], grid.judge
    monkeypatch.setattr(grid, "judge", lambda call: prepared.append(call) or judge(call))
    monkeypatch.setattr(grid, "GUESSED", {"prepare": 60.0, "time": 61.0})
    assert timed_in_minutes(2) == prepared == []


@pytest.mark.parametrize("act", ["prepare", "time", "the peer"])
def test_what_has_no_memory_beside_others_is_tried_again_alone(grid, bench, monkeypatch, tmp_path, act):
    calls = bench("draw").draw(bench("draw").RULES[0], 101, 4)[0]
    asked = {"prepare": [], "time": []}
    monkeypatch.setattr(grid, "memory", lambda call: grid.ROOM + (call == calls[3]))

    def answers_of(script, now, given, limits, until, running=None):
        for call in given:
            asked[now].append(call)
            short = call == calls[1] and asked[now].count(call) == 1
            none = "OutOfMemoryError: 2 GiB" if short else None
            passed = {"peer_why": none if act == "the peer" else ""}
            found = {"error_over_budget": 0.5} if now == "prepare" else {"fwd": passed, "fwd+bwd": passed}
            yield call, found, none if now == act else None

    monkeypatch.setattr(grid, "answers_of", answers_of)
    run = grid.Run(tmp_path / "grid.json", "abc", 4)
    crowded = run.turn(calls, float("inf"), 2)
    assert sorted(crowded) == sorted([calls[1], calls[3]]) and calls[3] not in asked["prepare"]
    assert run.left(calls) == [calls[1], calls[3]]
    assert run.turn(crowded, float("inf"), 1) == [] == run.left(calls)
    assert all(row["why"] is None and not row["peer_why"] for row in bench("results").read(run.file))


def test_a_peer_is_compiled_without_being_launched_and_then_tuned(bench, monkeypatch):
    """Through Triton's own autotuner, whose benchmark comes from the driver."""
    triton = pytest.importorskip("triton")
    grid, ran = bench("grid"), []
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(SimpleNamespace())
    launch = lambda self, *_, grid, warmup, num, **__: ran.append((num, warmup))
    monkeypatch.setattr(triton.JITFunction, "run", launch)
    try:
        kernel = triton.JITFunction(test_a_draw_is_that_of_its_seed_and_covers_the_ranges)
        configs = [triton.Config({"num": n}) for n in (1, 2, 3)]
        tuner = lambda: triton.runtime.Autotuner(kernel, ["x"], configs, ["x"], None, None)
        with grid.compiled_alone():
            tuner()[1,](5)
        assert ran == [(1, True), (2, True), (3, True), (1, True)]
        assert triton.JITFunction.run is launch
        grid.tuned_with(lambda call, quantiles: call() or [float(ran[-1][0] != 2)] * 3)
        tuner()[1,](5)
        assert ran[4:] == [(1, False), (2, False), (3, False), (2, False)]
    finally:
        driver._active = before


def test_the_literal_attention_on_solved_values_stays_in_its_document(bench):
    """Each document alone gives what it gives packed."""
    attention = bench("attention_cases")
    x = attention.lucid_inputs(torch.Generator().manual_seed(0), 1, 30, 1, 8, 8, queries=2)
    form = partial(attention.read_by_softmax, attention.spec_of("lucid").recurrent)
    packed = form(**x, cu_seqlens=torch.tensor([0, 12, 30]))[0]
    alone = [form(**{name: y[:, a:b] for name, y in x.items()})[0] for a, b in ((0, 12), (12, 30))]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-12, atol=1e-12)
