"""Checkpoints that are written in full or not at all: `step-00000100/` holds what `torch.distributed.checkpoint` writes, and manifest.json.

Every rank writes its own part into `step-00000100.tmp/`, synced to the disk; then the first rank adds the manifest (sha256
and size of every file, the config, the commit) and renames: a directory without `.tmp` was complete when it was made, and its
digests tell whether it still is. Any number of ranks reads it. Knows nothing of what the state means; `state.py` does.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import manifest
from .manifest import CheckpointError, Damaged
from .world import World

# of one process that is asked to write alone, and says so
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class Checkpoints:
    """The checkpoints of a run in `directory`: writes them, one at a time, and keeps the `keep` newest.

    config: JSON-ready, what a resuming run is compared with. background: `save` returns when the state is copied to the CPU's
    memory, and a thread writes it while the run goes on; so a kill may cost the steps taken meanwhile too.
    """

    def __init__(self, directory: Path, config: dict[str, Any], keep: int, world: World, background: bool):
        self.directory, self.config, self.keep, self.world = directory, config, keep, world
        self.last: Path | None = None
        # A group of its own: on the run's, the thread's messages and the steps' would meet.
        self.group = None if world.mesh is None else dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1) if background else None
        self.underway: Future[Path] | None = None

    def save(self, step: int, state: dict[str, Tensor]) -> None:
        """Begins the checkpoint of `step`; without a thread it is done on return. Every rank calls it, with its own part.

        Raises CheckpointError if this one, or the one before, cannot be written (a full disk): nothing of it stays, and
        earlier checkpoints are untouched.
        """
        self.wait()
        final = self.directory / f"step-{step:08d}"
        tmp = final.with_name(final.name + ".tmp")
        self.world.agree(lambda: shutil.rmtree(tmp, ignore_errors=True))
        where: dict[str, Any] = {"checkpoint_id": tmp, "process_group": self.group, "no_dist": self.group is None}
        if self.thread is None:
            self.last = self._finish(final, tmp, lambda: dcp.save(state, **where))
        else:
            saving = dcp.async_save(state, **where)
            assert isinstance(saving, Future), "without async_checkpointer_type it is one"
            self.underway = self.thread.submit(self._finish, final, tmp, saving.result)

    def wait(self) -> Path | None:
        """Until nothing is being written; the newest checkpoint that this run wrote or resumed from. Raises what `save` raises."""
        if self.underway is not None:
            underway, self.underway = self.underway, None
            self.last = underway.result()
        return self.last

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.wait()
        if self.thread is not None:
            self.thread.shutdown()

    def _finish(self, final: Path, tmp: Path, written: Callable[[], object]) -> Path:
        try:
            written()
            if self.world.is_first:
                self._publish(final, tmp)
        except (OSError, RuntimeError, CheckpointException) as error:
            if self.world.is_first:
                shutil.rmtree(tmp, ignore_errors=True)
            before = [path.name for path in _newest_first(self.directory) if path.name < final.name]
            left = f"{before[0]} is untouched" if before else "there is none before it"
            raise CheckpointError(f"the checkpoint {final} could not be written ({_reason(error)}); {left}") from error
        return final

    def _publish(self, final: Path, tmp: Path) -> None:
        manifest.write(tmp, self.config)
        _sync_directory(tmp)
        # A checkpoint of this step is damaged if there is one: a run resumes from the newest whole one.
        shutil.rmtree(final, ignore_errors=True)
        tmp.rename(final)
        _sync_directory(self.directory)
        kept = [path for path in _newest_first(self.directory) if path.name <= final.name][: self.keep]
        for path in self.directory.glob("step-*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def begun(directory: Path) -> bool:
    """Whether a checkpoint was ever completed in `directory`, whole or damaged since."""
    return bool(_newest_first(directory))


def latest(directory: Path, config: dict[str, Any] | None = None) -> Path | None:
    """The newest whole checkpoint in `directory`; None if none was ever completed.

    Every digest is verified; a damaged checkpoint is passed over with a warning that names it and what is wrong with it.
    Raises CheckpointError if all are damaged, if the format is another version's, or, given `config`, if the checkpoint was
    made under another one: the differing fields are named. TypeError for a `config` that is not JSON-ready.
    """
    wanted = None if config is None else manifest.plain(config)
    damaged = []
    for path in _newest_first(directory):
        try:
            there = manifest.verified(path)
        except Damaged as why:
            damaged.append(f"{path.name} is damaged ({why})")
            continue
        for message in damaged:
            warnings.warn(f"{message}; {path.name} is used instead", stacklevel=2)
        if wanted is not None:
            manifest.compare(path, there["config"], wanted)
        return path
    if damaged:
        raise CheckpointError(f"no checkpoint in {directory} is whole: {'; '.join(damaged)}. Remove them to start afresh")
    return None


def contents(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The name, whole shape and dtype of every tensor in the checkpoint directory `path`; CheckpointError if it holds anything else."""
    found = {}
    for name, stored in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{path}: {name} is stored as {type(stored).__name__}, expected tensors alone")
        found[name] = stored.size, stored.properties.dtype
    return found


def load(path: Path, into: dict[str, Tensor] | None = None, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The tensors of the checkpoint directory `path`. Call `latest` first: it verifies.

    into: those wanted, by name, filled in place, each rank's part of a DTensor; None is all of them, whole, on the CPU.
    """
    if into is None:
        into = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in contents(path).items()}
    try:
        dcp.load(into, checkpoint_id=path, process_group=group, no_dist=group is None)
    except (OSError, RuntimeError, CheckpointException) as error:  # the last is a BaseException
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    return into


def _reason(error: BaseException) -> BaseException:
    """What went wrong on the first rank that it went wrong on; torch turns an OSError into others."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while not isinstance(error, OSError) and (below := error.__cause__ or error.__context__):
        error = below
    return error


def _newest_first(directory: Path) -> list[Path]:
    return sorted((p for p in directory.glob("step-*") if p.suffix != ".tmp"), reverse=True)


def _sync_directory(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
