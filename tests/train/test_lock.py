"""One process at a time in a directory: a second one gets an error that names the first; the lock ends with its process."""

import errno
import fcntl
import socket
import sys
from dataclasses import replace

import pytest

from needlework.testing.ranks import ranks
from needlework.train import AdamW, InUse, alone, latest, train

from .tiny import CONFIG, Tiny, batch, stop_at


def hold(pipe, directory):
    with alone(directory):
        pipe.send(None)
        pipe.recv()


@pytest.fixture
def holder(forked, tmp_path):
    """Another process that has locked tmp_path / "run"."""
    process, pipe = forked(hold, tmp_path / "run")
    pipe.recv()
    return process


def test_a_second_process_is_told_who_is_there_and_a_kill_lets_go(holder, tmp_path):
    told = rf"run is in use by process {holder.pid} on {socket.gethostname()}, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    for _ in range(2):  # asking takes nothing away
        with pytest.raises(InUse, match=told), alone(tmp_path / "run"):
            pass
    with pytest.raises(InUse, match=told):
        train(Tiny(), batch, CONFIG, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    holder.kill()
    holder.join()
    assert train(Tiny(), batch, CONFIG, tmp_path / "run").losses


def test_who_trains_is_alone_until_the_last_step(tmp_path):
    def intrude(progress):
        with pytest.raises(InUse), alone(tmp_path):
            pass

    train(Tiny(), batch, CONFIG, tmp_path, on_step=intrude)
    with alone(tmp_path):
        pass


def test_a_file_system_without_locks_keeps_nobody_out_and_says_so(monkeypatch, tmp_path):
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match=r"has no locks \(No locks available\): nothing keeps a second process out"):
        assert train(Tiny(), batch, CONFIG, tmp_path).losses


def main(directory):
    try:
        train(Tiny(dropout=0.0), batch, CONFIG, directory)
    except InUse as error:
        return str(error)


@pytest.mark.slow
def test_the_ranks_of_a_run_have_one_lock_and_are_all_told_of_another_s(holder, tmp_path):
    told = ranks(2, main, str(tmp_path / "run"))
    assert f"in use by process {holder.pid}" in told[0] and told[0] == told[1]
    assert ranks(2, main, str(tmp_path / "free")) == [None, None]


def test_what_cannot_begin_leaves_no_directory(tmp_path, monkeypatch):
    unknown = replace(CONFIG, optim=AdamW(lr=1e-2, rates=(("no such parameter", 0.1),)))
    for config in (unknown, replace(CONFIG, recompute=True)):
        with pytest.raises(ValueError):
            train(Tiny(), batch, config, tmp_path / "run")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="TensorBoard is not installed"):
        train(Tiny(), batch, replace(CONFIG, tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_step_is_no_checkpoint_so_another_config_may_come(tmp_path):
    train(Tiny(), batch, CONFIG, tmp_path, stop=stop_at(0))
    assert latest(tmp_path) is None
    assert len(train(Tiny(), batch, replace(CONFIG, seed=4), tmp_path).losses) == 12
