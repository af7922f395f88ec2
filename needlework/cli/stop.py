"""Ctrl-C and a scheduler's SIGTERM as a flag that a run polls."""

import signal
from types import FrameType
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside the `with`, `stop()` is True once a signal has come.

    The first signal raises KeyboardInterrupt only if `stop` was never called, for then there is nothing to save. Later signals are
    ignored, also after the `with`: the run saves, and the process ends.
    """

    def __init__(self):
        self.signalled = self.polled = False

    def __call__(self) -> bool:
        self.polled = True
        return self.signalled

    def __enter__(self):
        self.before = {sign: signal.signal(sign, self._receive) for sign in ENDS}
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self.signalled:
            for sign, handler in self.before.items():
                signal.signal(sign, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again, self.signalled = self.signalled, True
        if not (again or self.polled):
            raise KeyboardInterrupt
