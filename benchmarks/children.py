"""What a benchmark does with a call in a process of its own, so that a kernel that hangs or dies takes nothing along."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Timer

import torch
from draw import Call
from run import why

Act = Callable[[Call, dict], None]  # of a call, what it finds, filled as it goes


def answer(acts: Mapping[str, Act]) -> None:
    """What a child does, and then it ends: of each call that it reads a line of JSON. After an error the GPU is in an unknown state, so
    no more follow. Nothing where this process is no child."""
    if sys.argv[1:2] != ["--act"]:
        return
    for text in sys.stdin:
        call = Call.of(json.loads(text))
        found: dict = {}
        reason = None
        try:
            acts[sys.argv[2]](call, found)
        except Exception as error:  # Triton, LLVM, ptxas and a launch raise what they like
            reason = why(error)
        print(json.dumps({"name": call.name, "found": found, "why": reason}), flush=True)
        if reason:
            raise SystemExit(1)
        torch.cuda.empty_cache()
    raise SystemExit(0)


class Running:
    """Children that run, and can be stopped for a while: what they launch would take turns with what is timed."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.children: set[subprocess.Popen] = set()

    @contextmanager
    def started(self, command: list[str], **settings: object) -> Iterator[subprocess.Popen]:
        """One more, which is none of them when it has ended."""
        with self.lock:  # none starts while they are stopped
            child = subprocess.Popen(command, **settings)
            self.children.add(child)
        with child:
            try:
                yield child
            finally:
                child.kill()
                with self.lock:
                    self.children.remove(child)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        with self.lock:
            self._send(signal.SIGSTOP)
            try:
                yield
            finally:
                self._send(signal.SIGCONT)

    def _send(self, what: signal.Signals) -> None:
        for child in self.children:
            child.send_signal(what)


def answers_of(
    script: Path,
    act: str,
    calls: Iterable[Call],
    limits: Mapping[str, int],
    until: float = math.inf,
    running: Running | None = None,
) -> Iterator[tuple[Call, dict, str | None]]:
    """What a child of `script` finds of these calls and why that is not all, each as soon as it is found, as far as it comes; that it dies or
    does not end, of the call at which it does. A call is taken from `calls` when the one before it is answered. limits: seconds of a call,
    by act, those in which it is stopped included. `until`: when the child is ended (time.monotonic), and of the call that it had begun
    nothing is said. `running`: whose children it is one of."""
    # which configuration of a peer is fastest is found again by the process that times it
    env = os.environ | {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0", "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, str(script), "--act", act], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        suppress(BrokenPipeError),  # one that has ended reads no more: what it did not say is said for it
        (running or Running()).started(command, env=env, stdin=pipe, stdout=pipe, stderr=errors, text=True) as child,
    ):
        for call in calls:
            with suppress(BrokenPipeError):
                print(json.dumps(call._asdict()), file=child.stdin, flush=True)
            limit = min(limits[act], until - time.monotonic())
            answer, late = _next(child, limit)
            if answer is None and late and limit < limits[act]:
                return
            if answer is None:
                errors.seek(0)
                ended = f"its process ended: {error_in(errors.read())}"
                yield call, {}, f"did not end in {limit} s" if late else ended
                return
            yield call, answer["found"], answer["why"]
            if answer["why"]:
                return


def error_in(text: str) -> str:
    """The last line that names an error, without one the end of the text."""
    named = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named[-1] if named else text.strip())[-300:]


def _next(child: subprocess.Popen, seconds: float) -> tuple[dict | None, bool]:
    """Its next answer, None where it gives no more; whether it was ended because it gave none in so many seconds."""
    assert child.stdout is not None
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        child.kill()

    timer = Timer(max(seconds, 0), end)
    timer.start()
    try:
        lines = (json.loads(line) for line in child.stdout if line.startswith('{"name"'))
        return next(lines, None), bool(late)
    finally:
        timer.cancel()
