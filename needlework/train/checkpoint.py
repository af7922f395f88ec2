"""Checkpoints that are whole or not there: `step-00000100/` holds state.pt and manifest.json.

Written into `step-00000100.tmp/`, the manifest (sha256 and size of every file, the config) last, synced to the disk, then
renamed: a directory without `.tmp` was complete when it was made, and its digests tell whether it still is.
Knows nothing of what `state` holds; `loop.py` does.
"""

import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be resumed from."""


class _Damaged(Exception):
    pass


def save(directory: Path, step: int, state: dict[str, Any], config: dict[str, Any], keep: int) -> Path:
    """Writes the checkpoint of `step` and removes all but the `keep` newest.

    state: nested dicts and lists of tensors and numbers. config: JSON-ready, what a resuming run is compared with.
    Raises CheckpointError if it cannot be written (a full disk): nothing of it stays, and earlier checkpoints are untouched.
    """
    final = directory / f"step-{step:08d}"
    tmp = final.with_name(final.name + ".tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        with (tmp / STATE).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with (tmp / MANIFEST).open("w") as file:
            json.dump(_manifest(tmp, step, config), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(tmp)
        # What stands here already is damaged: a run resumes from the newest whole checkpoint, so it passes only damaged ones.
        shutil.rmtree(final, ignore_errors=True)
        tmp.rename(final)
        _sync_directory(directory)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(tmp, ignore_errors=True)
        # torch.save turns a failed write into a RuntimeError; the OSError behind it says what happened.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        before = [path.name for path in _newest_first(directory) if path.name < final.name]
        left = f"{before[0]} is untouched" if before else "there is none before it"
        raise CheckpointError(f"the checkpoint {final} could not be written ({reason}); {left}") from error
    kept = [path for path in _newest_first(directory) if path.name <= final.name][:keep]
    for path in directory.glob("step-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
    return final


def latest(directory: Path, config: dict[str, Any] | None = None) -> Path | None:
    """The newest whole checkpoint in `directory`; None if none was ever completed.

    Every digest is verified; a damaged checkpoint is passed over with a warning that names it and what is wrong with it.
    Raises CheckpointError if all are damaged, if the format is another version's, or, given `config`, if the checkpoint was
    made under another one: the differing fields are named. TypeError for a `config` that is not JSON-ready.
    """
    wanted = None if config is None else _plain(config)
    damaged = []
    for path in _newest_first(directory):
        try:
            manifest = _verify(path)
        except _Damaged as why:
            damaged.append(f"{path.name} is damaged ({why})")
            continue
        for message in damaged:
            warnings.warn(f"{message}; {path.name} is used instead", stacklevel=2)
        if wanted is not None:
            _compare(path, manifest["config"], wanted)
        return path
    if damaged:
        raise CheckpointError(f"no checkpoint in {directory} is whole: {'; '.join(damaged)}. Remove them to start afresh")
    return None


def load(path: Path) -> dict[str, Any]:
    """The state saved in the checkpoint directory `path`, on the CPU. Call `latest` first: it verifies."""
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error


def _newest_first(directory: Path) -> list[Path]:
    return sorted((p for p in directory.glob("step-*") if p.suffix != ".tmp"), reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(config))


def _config_digest(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _manifest(path: Path, step: int, config: dict[str, Any]) -> dict[str, Any]:
    files = {p.name: {"sha256": _digest(p), "size": p.stat().st_size} for p in sorted(path.iterdir()) if p.name != MANIFEST}
    return {"format": FORMAT, "step": step, "config_sha256": _config_digest(config), "config": config, "files": files}


def _verify(path: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint; _Damaged says what is wrong otherwise."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {manifest['format']}, expected {FORMAT}")
        if _config_digest(manifest["config"]) != manifest["config_sha256"]:
            raise _Damaged(f"the config in {MANIFEST} does not match its sha256")
        for name, file in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != file["size"]:
                raise _Damaged(f"{name} has {size} bytes, {file['size']} were written")
            if _digest(path / name) != file["sha256"]:
                raise _Damaged(f"{name} does not match its sha256")
    except OSError as error:
        raise _Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{MANIFEST} cannot be read: {error}") from error
    return manifest


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _fields(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, config


def _compare(path: Path, saved: dict[str, Any], wanted: dict[str, Any]):
    there, here = dict(_fields(saved)), dict(_fields(wanted))
    differing = [
        f"{name}: {there.get(name, 'absent')!r} there, {here.get(name, 'absent')!r} here"
        for name in sorted(there.keys() | here.keys())
        if name not in there or name not in here or there[name] != here[name]
    ]
    if differing:
        raise CheckpointError(f"{path} was made under another config ({'; '.join(differing)})")


def _sync_directory(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
