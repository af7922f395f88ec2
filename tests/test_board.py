"""What is shown while recipes run."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from needlework.board import Board
from needlework.train import Progress


@pytest.mark.parametrize("tasks, found", [(("passkey",), "75%"), ((), "")])
def test_a_run_of_any_tasks_and_lengths_is_shown(tasks, found):
    board = Board({"one": SimpleNamespace(title="One"), "two": SimpleNamespace(title="Two")}, {"one": 10.0, "two": 20.0}, 1)
    board.progress["two"] = Progress(step=5, steps=10, loss=2.5, tokens=50, seconds=1.0, tokens_per_second=50.0)
    board.started["two"] = 0.0, 0
    lengths = [512, 1024]
    entry = {"lengths": lengths, "tasks": tasks, "loss": {"512": 1.25, "1024": 1.5}, "train": {"tokens_per_second": 1000.0}}
    board.finish("one", entry | {task: {str(T): {"accuracy": 0.75} for T in lengths} for task in tasks})
    out = io.StringIO()
    Console(file=out, width=100).print(board)
    one, two = out.getvalue().splitlines()[1:3]
    assert one.split() == ["One", "━" * 24, "100%", "1.250", "1,000", *([found] if found else [])]
    assert two.split() == ["Two", "━" * 12 + "╺" * 12, "50%", "2.500", "50"]
