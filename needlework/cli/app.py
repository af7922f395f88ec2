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
    """Standard output. A closed pipe (`| head`) acts as Ctrl-C: a run saves and ends."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # sends the rest of the output to /dev/null
        except SystemExit:
            signal.raise_signal(signal.SIGINT)


# a pipe has no width, and rich would cut tables to 80 columns; markup is off because [brackets] are shapes, extras and paths
# force_terminal: a pipe gets no control characters, whatever FORCE_COLOR is
console = Output(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False, force_terminal=sys.stdout.isatty())
errors = Console(stderr=True, markup=False, highlight=False, force_terminal=sys.stderr.isatty())

CorpusPaths = Annotated[
    list[Path] | None,
    typer.Option(help='Your text: files, folders, .jsonl or .parquet with a "text" field. Default: Python\'s own library.'),
]
Runs = Annotated[Path, typer.Option(help="The folder that holds runs.")]


def place(runs: Path, name: str) -> Path:
    """RUNS/NAME. ValueError for a name that cannot be a folder's, or is that of the corpora."""
    from needlework.experiment.recipe import is_folder

    if not is_folder(name) or name == "corpora":
        raise ValueError(f"--name {name!r}: expected the name of a folder in {runs}, without separators, and not corpora")
    return runs / name
