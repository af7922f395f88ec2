"""Doctor: it sees a wrong kernel, strikes its plan off, and says what it needs where it cannot run."""

import json
import os
import subprocess
import sys

import pytest
import torch

from needlework.ops.common import launch, struck
from needlework.ops.specs import specs
from needlework.testing import doctor

CPU = torch.device("cpu")


def command(*arguments, **environment):
    run = [sys.executable, "-m", "needlework", "doctor", *arguments]
    return subprocess.run(run, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do():
    pytest.importorskip("triton")
    done = command(TRITON_INTERPRET="0")
    assert done.returncode == 1 and "--compile-only" in done.stdout and "Traceback" not in done.stderr


def test_it_runs_in_the_interpreter_and_writes_a_report(tmp_path):
    pytest.importorskip("triton")
    done = command("--report", str(tmp_path / "r.json"), TRITON_INTERPRET="1", XDG_CACHE_HOME=str(tmp_path))
    report = json.loads((tmp_path / "r.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    # no op takes CCQ's kernels over a sequence yet: they are compiled, not judged
    assert {row["engine"] for row in report["rows"]} == set(doctor.ENGINES) - {"ccq/curvature"}
    assert report["triton"] and report["ptxas"]


def test_every_engine_has_a_table_and_every_table_an_engine():
    from needlework.ops import common

    folder = launch.Path(common.__file__).parents[1]
    tables = {str(path.relative_to(folder)).removesuffix(".plans.json") for path in folder.glob("*/*.plans.json")}
    assert tables == set(doctor.ENGINES)
    assert set(doctor.RULES) <= {spec.name for spec in specs()}


def test_a_wrong_kernel_is_struck_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    struck._read.cache_clear()
    row = launch.rows("delta/scalar")[0]
    monkeypatch.setattr(doctor, "cases", lambda device, full: [("delta/gated", row, torch.bfloat16, 64, 64, 9, "random")])
    monkeypatch.setattr(doctor, "steps", lambda device, done: [])
    monkeypatch.setattr(doctor, "budgeted", lambda *_: {"o": 0.4, "dk": 31.0})
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    (verdict,) = doctor.run(CPU, False, lambda _: None)
    assert verdict.failing == ("dk 31.00",)
    assert "dk 31.00" in struck.struck("delta/scalar", row.name)
    struck._read.cache_clear()


def test_it_knows_the_tools_that_miscompile():
    assert "ptxas 12.8.93" in doctor.warning({"triton": "3.6.0", "ptxas": "12.8.93"}, (9, 0))
    assert doctor.warning({"triton": "3.6.0", "ptxas": "13.4.59"}, (9, 0)) is None
    assert doctor.warning({"triton": "3.7.1", "ptxas": "12.8.93"}, (9, 0)) is None
