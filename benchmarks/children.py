"""What a benchmark does with a call in a process of its own, so that a kernel that hangs or dies takes nothing along."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from draw import Call
from run import why

Act = Callable[[Call, dict], None]  # of a call, what it finds, filled as it goes


def answer(acts: Mapping[str, Act]) -> None:
    """What a child does, and then it ends: of each call that it was given a line of JSON. After an error the GPU is in an unknown state, so
    no more follow. Nothing where this process is no child."""
    if sys.argv[1:2] != ["--act"]:
        return
    for text in sys.argv[3:]:
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


def answers_of(script: Path, act: str, calls: list[Call], limits: Mapping[str, int]) -> Iterator[tuple[Call, dict, str | None]]:
    """What a child of `script` finds of these calls and why that is not all, as far as it comes; that it dies or does not end, of the call
    at which it does. limits: seconds of a call, by act."""
    # which configuration of a peer is fastest is found again by the process that times it, alone on the GPU
    env = os.environ | {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
    command = [sys.executable, str(script), "--act", act, *(json.dumps(call._asdict()) for call in calls)]
    limit = limits[act] * len(calls)
    try:
        run = subprocess.run(command, env=env, timeout=limit, capture_output=True, text=True, check=False)
        output, ended = run.stdout, f"its process ended: {run.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired as late:
        output, ended = (late.stdout or b"").decode(), f"did not end in {limit} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    for call, line in zip(calls, lines, strict=False):
        yield call, line["found"], line["why"]
    if len(lines) < len(calls) and not (lines and lines[-1]["why"]):
        yield calls[len(lines)], {}, ended
