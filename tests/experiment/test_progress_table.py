"""What is shown while recipes run."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from needlework.experiment.progress_table import ProgressTable
from needlework.train import Progress


@pytest.mark.parametrize("tasks, found", [(("passkey",), "75%"), ((), "")])
def test_a_run_of_any_tasks_and_lengths_is_shown(tasks, found):
    table = ProgressTable(
        {"one": SimpleNamespace(title="One"), "two": SimpleNamespace(title="Two")}, {"one": 10.0, "two": 20.0}, 1
    )
    table.progress["two"] = Progress(step=5, steps=10, loss=2.5, tokens=50, seconds=1.0, tokens_per_second=50.0)
    table.started["two"] = 0.0, 0
    lengths = [512, 1024]
    entry = {"lengths": lengths, "tasks": tasks, "loss": {"512": 1.25, "1024": 1.5}, "train": {"tokens_per_second": 1000.0}}
    table.finish("one", entry | {task: {str(T): {"accuracy": 0.75} for T in lengths} for task in tasks})
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    one, two = out.getvalue().splitlines()[1:3]
    assert one.split() == ["One", "━" * 24, "100%", "1.250", "1,000", *([found] if found else [])]
    assert two.split() == ["Two", "━" * 12 + "╺" * 12, "50%", "2.500", "50"]


@pytest.mark.parametrize("encoding, full, empty", [("utf-8", "━", "╺"), ("ascii", "#", "-")])
def test_bars_are_of_what_the_terminal_can_show(encoding, full, empty):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    Console(file=file, width=100).print(half_done())
    assert full * 12 + empty * 12 in file.buffer.getvalue().decode(encoding)


def test_in_a_log_it_is_one_line():
    table = half_done()
    assert table.line() == "0 of 2 done; two step 5 of 10 (50%), loss 2.500, 50 tokens/s; about 20 s left"
    table.finish("two", {})
    assert table.line() == "1 of 2 done; about 10 s left"


def half_done():
    table = ProgressTable(
        {"one": SimpleNamespace(title="One"), "two": SimpleNamespace(title="Two")}, {"one": 10.0, "two": 20.0}, 1
    )
    table.progress["two"] = Progress(step=5, steps=10, loss=2.5, tokens=50, seconds=1.0, tokens_per_second=50.0)
    table.started["two"] = time.monotonic(), 5
    return table
