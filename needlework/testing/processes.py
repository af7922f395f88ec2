"""Processes that start at once: forked from a server that has imported what each of them would import for itself, seconds of PyTorch
and Triton, and that has no GPU. Imports neither, so that the server can start before its parent has imported them."""

import os
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext

IMPORTED = ("triton", "needlework.testing.doctor", "needlework.testing.builds")


def context() -> ForkServerContext:
    """Its processes have the environment that there was at the first call."""
    made = get_context("forkserver")
    made.set_forkserver_preload(list(IMPORTED))
    forkserver.ensure_running()
    return made


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
