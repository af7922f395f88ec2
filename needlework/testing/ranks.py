"""Several ranks on this machine's CPU, in one gloo group, for tests of what spans ranks: a test file that is also a script.

def main(argument): ...; return result                  # on every rank, inside the group
def test_it(): assert ranks(2, __file__, "argument") == [result, result]
if __name__ == "__main__": member(main)
"""

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=2)  # of a rank that waits for another


def ranks(world: int, script: str, *arguments: str) -> list[Any]:
    """What `main(*arguments)` of `script` returned on each rank, in order. RuntimeError with all their output if one failed."""
    with tempfile.TemporaryDirectory() as directory:
        run = [sys.executable, script, directory, str(world), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(run, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{world} ranks of {script}:\n{done.stdout}")
        return [torch.load(Path(directory, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def member(main: Callable[..., Any]) -> None:
    """Runs main(*arguments) on as many ranks as `ranks` asked this process for, and ends it."""
    directory, world, *arguments = sys.argv[1:]
    started = set()
    for rank in range(int(world)):
        pid = os.fork()  # so that PyTorch is imported once; it has no threads yet
        if pid == 0:
            _rank(main, Path(directory), rank, int(world), arguments)
        started.add(pid)
    failed = False
    while started:
        pid, status = os.wait()
        started.discard(pid)
        if status and not failed:
            failed = True
            for other in started:  # they would wait for it
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)


def _rank(main: Callable[..., Any], directory: Path, rank: int, world: int, arguments: list[str]) -> None:
    try:
        torch.set_num_threads(1)
        store = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
        torch.save(main(*arguments), directory / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # a torn checkpoint is no Exception
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that ends by itself
