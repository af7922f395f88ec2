"""JSON that says which file it is when it is torn. A name that ends in .xz is the same text, compressed."""

import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_json(path: str | os.PathLike) -> Any:
    """What the file holds. ValueError names a file that is not JSON: half of it, none, too deep. OSErrors name it themselves."""
    return _read(path, json.loads)


def read_lines(path: str | os.PathLike) -> list[Any]:
    """What each line of the file holds; ValueError and OSErrors as in `read_json`."""
    return _read(path, lambda text: [json.loads(line) for line in text.splitlines()])


def _read(path: str | os.PathLike, parse: Callable[[str], Any]) -> Any:
    try:
        content = Path(path).read_bytes()
        return parse((lzma.decompress(content) if Path(path).suffix == ".xz" else content).decode())
    except (ValueError, RecursionError, lzma.LZMAError) as error:
        raise ValueError(f"{path}: torn, or no JSON ({error})") from None


def json_files(directory: str | Path) -> list[Path]:
    """The JSON files of a folder by name, *.json and *.json.xz (as `xz -9 -T1` writes them)."""
    return sorted(path for pattern in ("*.json", "*.json.xz") for path in Path(directory).glob(pattern))
