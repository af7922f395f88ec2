"""Several ranks on this machine's CPU, in one gloo group, for tests of what spans ranks.

def main(argument): ...; return result                  # on every rank, inside the group
def test_it(): assert ranks(2, main, "argument") == [result, result]
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from needlework.testing.processes import context

PATIENCE = timedelta(minutes=2)  # of a rank that waits for another
IMPORTED = ("needlework.data", "needlework.models", "needlework.train")  # what tests of ranks and of workers import


def ranks(world: int, main: Callable[..., Any], *arguments: str) -> list[Any]:
    """What `main(*arguments)`, a function of a module, returned on each rank, in order. RuntimeError with all their output if one
    failed."""
    made = context(IMPORTED)
    with tempfile.TemporaryDirectory() as directory:
        found = [Path(directory, f"{rank}.pt") for rank in range(world)]
        started = [made.Process(target=_rank, args=(main, directory, rank, world, arguments)) for rank in range(world)]
        for process in started:
            process.start()
        left = list(started)
        while left:
            wait([process.sentinel for process in left])
            left = [process for process in left if process.exitcode is None]
            if any(process.exitcode for process in started):
                for process in left:  # they would wait for those that failed
                    process.kill()
        if any(process.exitcode for process in started):
            said = "".join(path.with_suffix(".txt").read_text(errors="replace") for path in found)
            raise RuntimeError(f"{world} ranks of {main.__module__}:\n{said}")
        return [torch.load(path, weights_only=False) for path in found]


def _rank(main: Callable[..., Any], directory: str, rank: int, world: int, arguments: tuple[str, ...]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    said_in(Path(directory, f"{rank}.txt"))
    try:
        torch.set_num_threads(1)
        store = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
        torch.save(main(*arguments), Path(directory, f"{rank}.pt"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # a torn checkpoint is no Exception
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that ends by itself


def said_in(path: Path) -> None:
    """From here on all that this process says goes to a file."""
    with open(path, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
