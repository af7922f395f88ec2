"""How far a run is: lines in a pipe, a bar on a terminal, never both."""

import io
import re

import pytest
from rich.console import Console

from needlework.experiment import progress
from needlework.experiment.progress import Lines, time_left, training
from needlework.train import Progress


def after(step, steps=100):
    return Progress(step=step, steps=steps, loss=2.5, tokens=50 * step, seconds=2.0 * step, tokens_per_second=1234.5)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_the_first_step_one_in_ten_seconds_and_the_last(clock):
    console = Console(file=io.StringIO(), width=40)  # lines are longer, and stay whole
    with training(console, "Q-Delta", 100) as tell:
        for step in range(1, 101):
            tell(after(step))
            clock[0] += 1.0
    lines = console.file.getvalue().splitlines()
    assert [int(re.search(r"step (\d+) of 100", line)[1]) for line in lines] == [*range(1, 100, 10), 100]
    assert lines[1] == "Q-Delta: step 11 of 100 (11%), loss 2.500, 1,234 tokens/s, about 3 min left"
    assert lines[-1] == "Q-Delta: step 100 of 100 (100%), loss 2.500, 1,234 tokens/s, measuring now"
    assert all(line.isprintable() for line in lines)


def test_a_line_is_there_before_the_next_step(tmp_path):
    """A scheduler's log shows it: nothing waits in a buffer."""
    with (tmp_path / "log").open("w") as file:
        with training(Console(file=file), "Q-Delta", 100) as tell:
            tell(after(1))
            assert "step 1 of 100" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_gets_a_bar_and_no_lines(clock, encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=100, force_terminal=True, _environ={})
    with training(console, "Q-Delta", 100) as tell:
        tell(after(50))
    file.flush()
    shown = file.buffer.getvalue().decode(encoding)
    assert "Q-Delta" in shown and "50/100" in shown and "step 50" not in shown


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(clock):
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with training(console, "Q-Delta", 100) as tell:
        tell(after(50))
    assert console.file.getvalue().count("\n") == 1 and "step 50 of 100" in console.file.getvalue()


def test_what_is_told_is_made_only_when_it_is_shown(clock):
    console, made = Console(file=io.StringIO()), []
    lines = Lines(console)
    for _ in range(3):
        lines(lambda: made.append(1) or "told")
    assert len(made) == 1 and console.file.getvalue() == "told\n"
    clock[0] += progress.EVERY
    lines(lambda: "again")
    lines(lambda: "and at once", now=True)
    assert console.file.getvalue() == "told\nagain\nand at once\n"


def test_the_time_left_is_in_minutes_when_it_is_long():
    assert time_left(89.6) == "about 90 s left" and time_left(600) == "about 10 min left"


def test_beside_what_moves_on_a_terminal_no_line_is_printed(clock):
    """The table of a comparison, the status of doctor."""
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    Lines(console)(lambda: "0 of 2 done", now=True)
    assert console.file.getvalue() == ""
