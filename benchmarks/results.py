"""The file of results of one device: rows by key, so that several runs add up, written after each row."""

import json
from pathlib import Path

ROOT = Path(__file__).parent / "results"


def path(device: str, root: Path = ROOT) -> Path:
    return root / f"{device.replace(' ', '-').lower()}.json"


def key(row: dict) -> tuple:
    return row["op"], tuple(row["shape"].values()), row["dtype"], row["pass"]


def read(file: Path) -> list[dict]:
    return json.loads(file.read_text()) if file.is_file() else []


def get(file: Path, like: dict) -> dict:
    """The row of this key."""
    return next(row for row in read(file) if key(row) == key(like))


def put(file: Path, row: dict) -> None:
    """The row in place of the one of its key."""
    rows = {key(old): old for old in read(file)}
    rows[key(row)] = row
    _write(file, list(rows.values()))


def drop(file: Path, op: str, shape: dict[str, int]) -> None:
    """No row of a case that is over its error budget now."""
    rows = read(file)
    kept = [row for row in rows if (row["op"], row["shape"]) != (op, shape)]
    if len(kept) < len(rows):
        _write(file, kept)


def _write(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(file)
