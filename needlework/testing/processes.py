"""Processes that start at once: forked from a server that has imported what each of them would import for itself, seconds of PyTorch
and Triton, and that has no GPU. Imports neither, so that the server can start before its parent has imported them."""

import os
from collections.abc import Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = ("triton", "needlework.testing.doctor", "needlework.testing.builds")
FROZEN = "needlework.testing.frozen"
served: set[str] = set()


def context(imported: Sequence[str] = IMPORTED) -> ForkServerContext:
    """Its processes have the environment of the first call. A server without the modules is replaced by one with them too."""
    made = get_context("forkserver")
    if not served.issuperset(imported):
        wanted = served.union(imported)
        end()
        served.update(wanted)
    made.set_forkserver_preload([*sorted(served), FROZEN])
    forkserver.ensure_running()
    return made


def seconds() -> float:
    """Of CPU that the server and its processes that have ended took; 0 where /proc does not tell."""
    pid = forkserver._forkserver._forkserver_pid  # pyrefly: ignore[missing-attribute] (no annotations there)
    if pid is None or not (stat := Path(f"/proc/{pid}/stat")).exists():
        return 0.0
    after_name = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


def end() -> None:
    """Ends the server, and waits for it: what it took counts as this process's children's."""
    served.clear()
    forkserver._forkserver._stop()  # pyrefly: ignore[missing-attribute] (as above)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
