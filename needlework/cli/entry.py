"""The entry point: what a user did wrong is one line and exit status 1, never a traceback."""

import os
import signal
import sys

from rich.text import Text

from . import checkpoints, doctor, lists, reports, runs  # noqa: F401  their commands join the app
from .app import app, errors


def main() -> None:
    """Entry point: what a user did wrong is one line on stderr and exit status 1, never a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is Ctrl-C
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without Greek letters shows ? there
    try:
        app(repeated(sys.argv[1:], "--corpus"))
    except SystemExit as ended:
        status = ended.code
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        from needlework.run import EXPLAINED  # late: --help needs no PyTorch

        if not isinstance(error, EXPLAINED):
            raise
        errors.print(Text("needlework: ", style="red").append(one_line(error), style="default"), soft_wrap=True)
        status = 1
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from needlework.train import leave

        leave(status if isinstance(status, int) else 0)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # who read it has read enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 130
    raise SystemExit(status)


def one_line(error: Exception) -> str:
    """What it says, or what it is if it says nothing."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def repeated(arguments: list[str], option: str) -> list[str]:
    """`--corpus a b` as `--corpus a --corpus b`: an option takes one value, and a shell's pattern gives many."""
    out: list[str] = []
    taking = False
    for argument in arguments:
        if argument.startswith("-"):
            taking = argument == option
        elif taking and out[-1] != option:
            out.append(option)
        out.append(argument)
    return out
