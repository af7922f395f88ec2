"""Ctrl-C, and SIGTERM, which is a scheduler's: heard by who asks, and once."""

import signal
from types import FrameType
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside the `with`, `stop()` is whether it was told to stop. Who asks is not interrupted: it comes to a place to stop at.

    Before anyone has asked there is nothing to save, and the first signal is a KeyboardInterrupt. The next ones change nothing, after
    the `with` too: what is being saved is saved, and the process ends.
    """

    def __init__(self):
        self.told = self.asked = False

    def __call__(self) -> bool:
        self.asked = True
        return self.told

    def __enter__(self):
        self.before = {sign: signal.signal(sign, self._hear) for sign in ENDS}
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self.told:
            for sign, handler in self.before.items():
                signal.signal(sign, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        again, self.told = self.told, True
        if not (again or self.asked):
            raise KeyboardInterrupt
