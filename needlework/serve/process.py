"""A Python process that serves, the engine's or the front's: its threads' one lock, its garbage collector, the signals that end it."""

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENDS = (signal.SIGINT, signal.SIGTERM)
SWITCH = 0.5e-3  # seconds: so long a step waits at most for a thread that has the lock; Python's own 5 ms are several steps


@contextmanager
def settled() -> Iterator[None]:
    """What is there now stays while it serves. The collector looks at it no more, and the lock goes round sooner.

    A full collection of a process with PyTorch and a model stops every thread for 0.2 s.
    """
    interval, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if not frozen:  # who froze before has it so
            gc.unfreeze()


@contextmanager
def deaf() -> Iterator[None]:
    """For processes that this thread starts inside: no signal of ENDS reaches them, from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
