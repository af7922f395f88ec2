"""Stopped, killed, damaged, out of space: the next run goes on as if nothing had happened, or says why it cannot."""

import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch import nn

from needlework.train import AdamW, CheckpointError, train

from .tiny import CONFIG, OPTIMISERS, VOCABULARY, WIDTH, Tiny, batch, equal, lines, stop_at


class Killed(BaseException):
    """Ends a run wherever it is, as a signal would: nothing is saved on the way out."""


def kill_after(step):
    def on_step(progress):
        if progress.step == step:
            raise Killed

    return on_step


@contextmanager
def disk_full_beyond(size):
    """No file of this process may grow past `size` bytes: write() fails as on a full disk, below Python and PyTorch alike."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=OPTIMISERS)
def config(request):
    return replace(CONFIG, optim=OPTIMISERS[request.param])


@pytest.fixture
def whole(config, tmp_path):
    """A run that never stopped."""
    model = Tiny()
    return model, train(model, batch, config, tmp_path / "whole")


def test_a_stopped_run_resumes_bit_equal(config, whole, tmp_path):
    first = train(Tiny(), batch, config, tmp_path / "run", stop=stop_at(5))
    assert first.stopped and len(first.losses) == 5
    model = Tiny()
    second = train(model, batch, config, tmp_path / "run")
    assert not second.stopped and second.losses == whole[1].losses and second.tokens == whole[1].tokens
    assert equal(model, whole[0])
    assert second.seconds > first.seconds


def test_a_killed_run_resumes_bit_equal_from_its_last_checkpoint(config, whole, tmp_path):
    with pytest.raises(Killed):
        train(Tiny(), batch, config, tmp_path / "run", on_step=kill_after(8))
    assert lines(tmp_path / "run")[-1]["step"] == 8
    model, steps = Tiny(), []
    result = train(model, batch, config, tmp_path / "run", on_step=lambda p: steps.append(p.step))
    assert steps == [7, 8, 9, 10, 11, 12]
    assert result.losses == whole[1].losses and equal(model, whole[0])
    for key in ("step", "loss", "lr", "grad_norm", "tokens"):
        assert [r[key] for r in lines(tmp_path / "run")] == [r[key] for r in lines(tmp_path / "whole")]


def test_a_run_stopped_before_its_first_step_resumes_too(config, whole, tmp_path):
    assert train(Tiny(), batch, config, tmp_path / "run", stop=lambda: True).losses == ()
    model = Tiny()
    train(model, batch, config, tmp_path / "run")
    assert equal(model, whole[0])


def test_a_finished_run_is_only_read(config, whole, tmp_path):
    model = Tiny()
    again = train(model, lambda index: pytest.fail("a step was taken"), config, tmp_path / "whole")
    assert again == whole[1] and equal(model, whole[0])


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(config, whole, tmp_path):
    train(Tiny(), batch, config, tmp_path / "run", stop=stop_at(8))
    state = tmp_path / "run" / "step-00000008" / "__0_0.distcp"
    state.write_bytes(state.read_bytes()[:-1])
    model = Tiny()
    with pytest.warns(UserWarning, match="step-00000008 is damaged .*; step-00000006 is used instead"):
        result = train(model, batch, config, tmp_path / "run")
    assert result.losses == whole[1].losses and equal(model, whole[0])


def test_a_full_disk_keeps_the_previous_checkpoint_and_the_run_can_go_on(config, whole, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train(Tiny(), batch, config, run, on_step=kill_after(4))
    with disk_full_beyond(8192), pytest.raises(CheckpointError, match=r"File too large.*step-00000003 is untouched"):
        train(Tiny(), batch, config, run)
    assert sorted(p.name for p in run.iterdir()) == ["lock", "log.jsonl", "ran.json", "step-00000003"]
    model = Tiny()
    assert train(model, batch, config, run).losses == whole[1].losses
    assert equal(model, whole[0])


def test_a_full_disk_names_the_log_that_could_not_grow(tmp_path, monkeypatch):
    with disk_full_beyond(300), pytest.raises(OSError, match=r"ran\.json"):
        train(Tiny(), batch, CONFIG, tmp_path)
    monkeypatch.setattr("needlework.train.metadata.write", lambda *_: None)
    with disk_full_beyond(300), pytest.raises(OSError, match=r"log\.jsonl"):
        train(Tiny(), batch, CONFIG, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"lock", "log.jsonl"}


def test_another_config_is_refused_by_the_names_of_its_fields(tmp_path):
    train(Tiny(), batch, CONFIG, tmp_path, recipe={"corpus": {"kind": "stdlib"}}, stop=stop_at(2))
    other = replace(CONFIG, optim=AdamW(lr=2e-2, weight_decay=0.1))
    with pytest.raises(
        CheckpointError, match=r"optim\.lr: 0\.01 there, 0\.02 here; recipe\.corpus.kind: 'stdlib' there, 'files' here"
    ):
        train(Tiny(), batch, other, tmp_path, recipe={"corpus": {"kind": "files"}})


def test_another_model_is_refused(tmp_path):
    train(Tiny(), batch, CONFIG, tmp_path, stop=stop_at(2))
    model = Tiny()
    model.head = nn.Linear(WIDTH, VOCABULARY + 1)
    with pytest.raises(CheckpointError, match=r"(?s)another model: .*head\.weight"):
        train(model, batch, CONFIG, tmp_path)


def test_a_half_written_log_line_is_dropped_on_resume(tmp_path):
    train(Tiny(), batch, CONFIG, tmp_path, stop=stop_at(6))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    train(Tiny(), batch, CONFIG, tmp_path)
    assert [r["step"] for r in lines(tmp_path)] == list(range(1, 13))


def test_progress_counts_the_whole_run(tmp_path):
    train(Tiny(), batch, CONFIG, tmp_path, stop=stop_at(4))
    seen = []
    train(Tiny(), batch, CONFIG, tmp_path, on_step=seen.append)
    assert [(p.step, p.steps, p.tokens) for p in seen] == [(s, 12, s * 48) for s in range(5, 13)]
    assert all(p.tokens_per_second > 0 and p.seconds > 0 for p in seen)
