"""A command that trains starts itself again, one process for each GPU, on a machine with several.

torchrun starts the ranks, in a process of its own: its API would replace the signal handlers of this one.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch


def relaunch(argv: Sequence[str], ranks: int | None = None) -> int | None:
    """Runs `python -m needlework *argv` once for each rank, and returns the exit status; None if this process is to go on alone.

    ranks: how many processes; None is one for each GPU of this machine. None is also returned for one rank, and under torchrun
    or a scheduler, which have set WORLD_SIZE. Ctrl-C reaches the ranks, which save and end, and SIGTERM is passed on to them; this
    process waits for them.
    """
    ranks = torch.cuda.device_count() if ranks is None else ranks
    if ranks <= 1 or "WORLD_SIZE" in os.environ:
        return None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "needlework"]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen([*command, *argv], env=environment)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                pass
    finally:
        signal.signal(signal.SIGTERM, before)
