"""Files to documents: which files a corpus has, and the texts in each. Order, split and tokens are corpus.py's.

A text file is one document; of .jsonl, .json and .parquet every record is one (its "text"). What is no UTF-8 text is
`Unreadable`: the corpus skips and lists it.
"""

import codecs
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Tests repeat themselves; encodings/ and pydoc_data/ are tables; _sysconfigdata*.py describes the machine.
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class Unreadable(ValueError):
    """A file that holds no text; the message is the reason alone."""


class Source(NamedTuple):
    """A file of the corpus: its name relative to the root it was found under (its own name if it was given itself)."""

    name: str
    path: Path
    given: bool


def stdlib() -> list[Source]:
    """The .py files of the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_SOURCE]  # site-packages may be huge
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                sources.append(Source(path.relative_to(root).as_posix(), path, given=False))
    return sources


def found(paths: Iterable[str]) -> list[Source]:
    """The files that paths name: a file is itself, a directory every file below it but hidden ones.

    A file reached twice counts once. A folder that cannot be opened, and a link to nothing, are among them: reading them gives
    the reason. FileNotFoundError names a path that does not exist.
    """
    sources: dict[Path, Source] = {}
    for given in map(Path, paths):
        if not given.exists():
            raise FileNotFoundError(f"corpus: no such file or directory: {given}")
        if not given.is_dir():
            sources[given.resolve()] = Source(given.name, given, given=True)
            continue
        for path in _below(given):
            sources.setdefault(path.resolve(), Source(path.relative_to(given).as_posix(), path, given=False))
    return list(sources.values())


def _below(root: Path) -> Iterator[Path]:
    """Every file below a folder, sorted, but hidden ones."""
    closed: list[Path] = []
    paths = []
    for folder, folders, files in os.walk(root, onerror=lambda error: closed.append(Path(error.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder, name) for name in files if not name.startswith(".")]
    yield from sorted(path for path in paths if path.is_file() or not path.exists())
    yield from sorted(closed)


def documents(source: Source, limit: int | None) -> Iterator[tuple[str, bytes]]:
    """(name, UTF-8 text) of each document of a file; of a text file no more than `limit` bytes, and a character's (None: all).

    Unreadable for a file without text; ValueError for records without "text", naming the file, and the line.
    """
    match source.path.suffix.lower():
        case ".jsonl":
            texts = _jsonl(source.path)
        case ".json":
            texts = _json(source)
        case ".parquet":
            texts = _parquet(source.path)
        case _:
            yield source.name, _text(source.path, limit)
            return
    for record, text in texts:
        # A JSON string may hold half a surrogate pair, which has no UTF-8.
        yield f"{source.name}:{record}", text.encode("utf-8", "replace")


def _text(path: Path, limit: int | None) -> bytes:
    with path.open("rb") as file:
        data = file.read(
            -1 if limit is None else limit + 4
        )  # the longest character: what is left of a cut one reaches the limit
        whole = not file.read(1)
    if b"\0" in data:
        raise Unreadable("binary: it has a NUL byte")
    try:
        # A cut may fall inside a character: `final=False` leaves its bytes out.
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=whole).encode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _field(record: object, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f'{where}: expected an object with a "text" field, got {type(record).__name__}')
    if "text" not in record:
        raise ValueError(f'{where}: no "text" field; fields present: {", ".join(record) or "none"}')
    if not isinstance(record["text"], str):
        raise ValueError(f'{where}: "text" is {type(record["text"]).__name__}, expected a string')
    return record["text"]


def _jsonl(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: no JSON: {error}") from None
            yield number, _field(record, f"{path}, line {number}")


def _json(source: Source) -> Iterator[tuple[int, str]]:
    try:
        yield from list(_json_records(source.path))
    except ValueError as error:
        if source.given:
            raise
        # A directory may hold any JSON; only a file that was named itself must hold text.
        raise Unreadable(str(error)) from None


def _json_records(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        yield from _jsonl(path)  # JSON lines under the name .json; else its error names the line
        return
    for i, record in enumerate(content if isinstance(content, list) else [content]):
        yield i, _field(record, f"{path}, record {i}")


def _parquet(path: Path) -> Iterator[tuple[int, str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: no Parquet file: {error}") from None
    with file:
        if "text" not in file.schema_arrow.names:
            raise ValueError(f'{path}: no "text" column; columns present: {", ".join(file.schema_arrow.names)}')
        texts = (text for batch in file.iter_batches(columns=["text"]) for text in batch.column(0).to_pylist())
        for i, text in enumerate(texts):
            yield i, _field({"text": text}, f"{path}, row {i}")
