"""manifest.json: what a checkpoint's directory must hold to be whole, by sha256 and size, and the config that it was made under."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .metadata import commit

FORMAT = 2
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be resumed from."""


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says in what."""


def write(path: Path, config: dict[str, Any]) -> None:
    """Of all files in the directory `path` as they are, synced to the disk."""
    files = {p.name: {"sha256": _digest(p), "size": p.stat().st_size} for p in sorted(path.iterdir()) if p.name != MANIFEST}
    content = {"format": FORMAT, **commit(), "config_sha256": _config_digest(config), "config": config, "files": files}
    with (path / MANIFEST).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def verified(path: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint; Damaged says what is wrong otherwise."""
    try:
        content = json.loads((path / MANIFEST).read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: format {content['format']}, expected {FORMAT}: another version of needlework wrote it, and can resume it"
            )
        if _config_digest(content["config"]) != content["config_sha256"]:
            raise Damaged(f"the config in {MANIFEST} does not match its sha256")
        for name, file in content["files"].items():
            size = (path / name).stat().st_size
            if size != file["size"]:
                raise Damaged(f"{name} has {size} bytes, {file['size']} were written")
            if _digest(path / name) != file["sha256"]:
                raise Damaged(f"{name} does not match its sha256")
    except OSError as error:
        raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from error
    return content


def compare(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """CheckpointError names the fields in which the config of the checkpoint at `path` is not the one that is wanted."""
    there, here = dict(_fields(saved)), dict(_fields(wanted))
    differing = [
        f"{name}: {there.get(name, 'absent')!r} there, {here.get(name, 'absent')!r} here"
        for name in sorted(there.keys() | here.keys())
        if name not in there or name not in here or there[name] != here[name]
    ]
    if differing:
        raise CheckpointError(f"{path} was made under another config ({'; '.join(differing)})")


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(config))


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _fields(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, config


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _config_digest(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
