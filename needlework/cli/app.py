"""The app that the commands join, the console that they print on, and the options that several share."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Sequence mixers that find the needle: compare them, train them, measure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Output(Console):
    """Standard output. A reader that leaves (`| head`) is Ctrl-C: a run saves, and ends."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # what comes still goes nowhere
        except SystemExit:
            signal.raise_signal(signal.SIGINT)


# a pipe has no width of its own, and tables must not be cut there; [brackets] are shapes, extras and paths
# whatever FORCE_COLOR says, a pipe gets no terminal's control characters
console = Output(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False, force_terminal=sys.stdout.isatty())
errors = Console(stderr=True, markup=False, highlight=False, force_terminal=sys.stderr.isatty())

CorpusPaths = Annotated[
    list[Path] | None,
    typer.Option(
        help='Text to train on: files, folders, .jsonl or .parquet with a "text" field. Default: Python\'s own library.'
    ),
]
Runs = Annotated[Path, typer.Option(help="The folder that holds runs.")]


def place(runs: Path, name: str) -> Path:
    """RUNS/NAME; ValueError for a name that is none of a folder in it, or that of the texts there."""
    from needlework.experiment.recipe import is_folder

    if not is_folder(name) or name == "corpora":
        raise ValueError(f"--name {name!r}: expected the name of a folder in {runs}, without separators, and not corpora")
    return runs / name
