import subprocess
import sys

import pytest

from needlework.train import launch, relaunch


def test_one_rank_goes_on_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert relaunch(["mixers"]) is None and relaunch(["mixers"], ranks=1) is None


def test_what_torchrun_has_started_starts_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert relaunch(["mixers"], ranks=2) is None


def test_every_gpu_gets_a_process_of_the_same_command(monkeypatch):
    started = []

    class Done(subprocess.Popen):
        def __init__(self, command, env):
            started.append((command, env))

        def wait(self):
            return 3

        def __del__(self):
            pass

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(launch.subprocess, "Popen", Done)
    assert relaunch(["train", "demo:qdelta"]) == 3
    ((command, env),) = started
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"] and "--nproc-per-node=4" in command
    assert command[-4:] == ["-m", "needlework", "train", "demo:qdelta"] and "OMP_NUM_THREADS" in env


@pytest.mark.slow
def test_the_processes_run_and_their_failure_is_the_status(monkeypatch, capfd):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert relaunch(["no-such-command"], ranks=2) != 0
    assert "no-such-command" in "".join(capfd.readouterr())
