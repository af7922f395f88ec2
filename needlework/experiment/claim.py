"""A claim on a directory: one process works there at a time, and config.json says which recipes run there.

    <directory>/config.json      {recipe's name: its resume fingerprint}

A run with a checkpoint or a result keeps its config. A run with neither may begin anew with another.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needlework.files import write_whole
from needlework.json_file import read_json
from needlework.train import alone, begun


class RunError(RuntimeError):
    """A run's directory is not what the recipe says; the message names what differs and what to do."""


@contextmanager
def claimed(directory: Path, config: dict[str, Any]) -> Iterator[list[str]]:
    """Makes `directory`, locks it for this process, and writes `config`: recipe's name -> resume fingerprint.

    Yields the fields that differ from an earlier config whose runs have no checkpoint. InUse if another process has the directory;
    RunError, with the fields that differ, if a run there has a checkpoint or a result of another config.
    """
    with alone(directory):
        anew = _agree(directory, config)
        write_json(directory / "config.json", config)
        yield anew


def claimable(directory: Path, config: dict[str, Any]) -> None:
    """Raises what `claimed` would raise, before text is read and models are built. Writes nothing."""
    if (directory / "config.json").exists():
        with alone(directory):
            _agree(directory, config)


def _agree(directory: Path, config: dict[str, Any]) -> list[str]:
    path = directory / "config.json"
    there, here = read_json(path) if path.exists() else {}, plain(config)
    different = {name: sorted(differences(run, here.get(name), name)) for name, run in there.items()}
    spoilt = [field for name, fields in different.items() if has_work(directory / name) for field in fields]
    if spoilt:
        raise RunError(
            f"{directory} holds a run with another config ({', '.join(spoilt[:6])}); "
            "choose another --name, or remove that directory"
        )
    return [field for fields in different.values() for field in fields]


def has_work(run: Path) -> bool:
    """Whether a run's directory has a checkpoint or a result."""
    return begun(run / "training") or (run / "result.json").exists()


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config after a round trip through JSON: tuples are lists."""
    return json.loads(json.dumps(config))


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Paths of the fields in which two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return [d for key in keys for d in differences(a.get(key), b.get(key), f"{at}.{key}" if at else key)]
    return [] if a == b else [at]


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")
