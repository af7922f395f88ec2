import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from needlework.train import train
from needlework.train.log import Log, peak_memory

from .tiny import CONFIG, Tiny, batch, lines


def test_a_number_that_is_not_finite_is_null(tmp_path):
    with Log(tmp_path, 0) as log:
        log.write(step=1, loss=math.nan, grad_norm=math.inf, lr=0.5, note="seen")
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "note": "seen"}


def test_lines_past_the_step_are_dropped(tmp_path):
    with Log(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write(step=step)
    with Log(tmp_path, 2) as log:
        log.write(step=3, again=True)
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3] and lines(tmp_path)[-1]["again"]


def test_memory_is_the_most_that_the_process_held(tmp_path):
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(16 << 20)  # 64 MiB
    assert peak_memory(torch.device("cpu")) >= held.numel() * 4 and peak_memory(torch.device("cpu")) >= before > 1 << 20
    train(Tiny(), batch, CONFIG, tmp_path)
    assert lines(tmp_path)[0]["memory"] >= held.numel() * 4


def test_tensorboard_that_is_not_installed_is_refused_with_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        train(Tiny(), batch, replace(CONFIG, tensorboard=True), tmp_path)


def test_tensorboard_has_what_the_log_has(tmp_path, monkeypatch):
    """Against a stand-in, for TensorBoard is an extra."""
    written = []

    class SummaryWriter:
        def __init__(self, path, purge_step):
            written.append((path, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", type(sys)("tensorboard"))
    sys.modules["torch.utils.tensorboard"].SummaryWriter = SummaryWriter
    train(Tiny(), batch, replace(CONFIG, tensorboard=True, log_every=6), tmp_path)
    assert written[0] == (str(tmp_path / "tensorboard"), 1) and written[-1] == "closed"
    expected = [(name, r[name], r["step"]) for r in lines(tmp_path) for name in r if name != "step"]
    assert written[1:-1] == expected and len(expected) == 2 * 6
