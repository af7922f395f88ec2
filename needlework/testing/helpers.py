"""Processes that judge tasks side by side, and can be ended: a kernel that hangs or dies takes only its own along."""

import signal
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

import torch

from needlework.ops.runtime.precompile import compile_in
from needlework.testing.processes import context, cores
from needlework.testing.verdict import Task, Verdict, judge, unjudged

# seconds that a task may take, many times what the slowest needs: a kernel that waits for what never comes does not end
LIMIT = 300


class Helper:
    """One of some processes that judge one task after another. It can be ended, which a thread or a pool's worker cannot."""

    def __init__(self, device: str, processes: int) -> None:
        made = context()
        self.pipe, theirs = made.Pipe()
        self.process = made.Process(target=_serve, args=(theirs, device, processes), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.task, self.until = task, time.monotonic() + LIMIT
        self.pipe.send(task)

    def answer(self) -> list[Verdict] | str | None:
        """Its verdicts, None for none, or what became of it; to be asked when there is one or the time is over."""
        if not self.pipe.poll():
            return f"did not end in {LIMIT} s"
        try:
            return self.pipe.recv()
        except EOFError:
            return "its process died"

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


def _serve(pipe: Connection, device: str, processes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its helpers
    compile_in(max(1, cores() // processes))
    while True:
        pipe.send(judge(device, processes == 1, pipe.recv()))


def judged(device: torch.device, todo: list[Task], processes: int) -> Iterator[Verdict]:
    """Verdicts as they come, judged side by side: most of the time is compilation. A kernel that dies or hangs takes only its own
    process along; what came to no verdict beside others is judged again alone, in a process of its own."""
    again = []
    for task, outcome in _outcomes(device.type, todo, processes):
        if isinstance(outcome, list):
            yield from outcome
        elif processes > 1:
            again.append(task)
        else:
            yield unjudged(task, outcome or "", wrong=True)
    if again:
        yield from judged(device, again, 1)


def _outcomes(device: str, todo: list[Task], processes: int) -> Iterator[tuple[Task, list[Verdict] | str | None]]:
    left, busy = deque(todo), []
    try:
        while left or busy:
            while left and len(busy) < processes:
                busy.append(Helper(device, processes))
                busy[-1].give(left.popleft())
            soonest = min(helper.until for helper in busy)
            ready = wait([helper.pipe for helper in busy], max(soonest - time.monotonic(), 0))
            for helper in [h for h in busy if h.pipe in ready or h.until <= time.monotonic()]:
                task, outcome = helper.task, helper.answer()
                # a process that has lost its GPU is of no more use
                if left and isinstance(outcome, list) and processes > 1:
                    helper.give(left.popleft())
                else:
                    busy.remove(helper)
                    helper.end()
                yield task, outcome
    finally:
        for helper in busy:
            helper.end()
