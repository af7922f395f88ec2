"""The entry point: what a user did wrong is one line and exit status 1, never a traceback."""

import io
import os
import signal
import sys
from types import FrameType

from rich.text import Text

from needlework.explained import PYTHONS

from . import checkpoints, doctor, exchange, lists, look, reports, runs, serving, texts  # noqa: F401  their commands join the app
from .app import app, errors
from .stop import ENDS


def main() -> None:
    """Entry point: what a user did wrong is one line on stderr and exit status 1, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters shows ? there
    try:
        for end in ENDS:
            signal.signal(end, interrupt_once)
        status = status_of(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    if status == 130:
        ignore_the_next()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from needlework.train import leave

        leave(status if isinstance(status, int) else 0)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left: the rest of the buffer goes to /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 130
    raise SystemExit(status)


def status_of(arguments: list[str]) -> int | str | None:
    """The command's exit status."""
    if arguments[:1] == ["study"]:  # the old name, accepted for one release
        errors.print("needlework study is now needlework sweep", soft_wrap=True)
        arguments = ["sweep", *arguments[1:]]
    try:
        app(repeated(arguments, "--corpus"))
    except SystemExit as ended:
        return ended.code
    except ImportError:
        raise  # `__main__.py` says what to install
    except Exception as error:
        if not isinstance(error, PYTHONS):
            from needlework.experiment.runner import EXPLAINED  # late: it needs PyTorch

            if not isinstance(error, EXPLAINED):
                raise
        errors.print(Text("needlework: ", style="red").append(one_line(error), style="default"), soft_wrap=True)
        return 1
    return 0


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """The first signal raises KeyboardInterrupt. Later ones are ignored, so that what is being saved is saved."""
    ignore_the_next()
    raise KeyboardInterrupt


def ignore_the_next() -> None:
    """Ignores further signals, to the end of the process: restored handlers would kill it while Python exits."""
    for end in ENDS:
        signal.signal(end, signal.SIG_IGN)


def one_line(error: Exception) -> str:
    """The message in one line, or the error's type if it has none."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def repeated(arguments: list[str], option: str) -> list[str]:
    """`--corpus a b` as `--corpus a --corpus b`: typer's options take one value, and a shell's pattern gives many."""
    out: list[str] = []
    taking = False
    for argument in arguments:
        if argument.startswith("-"):
            taking = argument == option
        elif taking and out[-1] != option:
            out.append(option)
        out.append(argument)
    return out
