"""Text as a stream of pieces in a fixed order, which resumes at any piece.

`Records` reads through `datasets`, streaming, and never shuffles: the buffer of a shuffled stream is lost, and with it the record at
which to resume. The order of training is order.py's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class SourceError(RuntimeError):
    """A source that cannot be read; the message names it, the place and the reason."""


class Piece(NamedTuple):
    """Some text of a document: the document's key, which decides its side, the text, and whether the document ends with it."""

    key: str
    text: str
    ends: bool


class Stream(Protocol):
    """Pieces in a fixed order. The state is JSON, and a stream that loads it goes on after the piece that came last."""

    def __iter__(self) -> Iterator[Piece]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Described(Protocol):
    """A data set's name (`title`), and the fields of a record with a document's text and its key (None: the text is the key)."""

    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def id(self) -> str | None: ...


class Records:
    """The stream of `datasets.load_dataset(..., streaming=True)`; with `lines`, each of its texts is a line of JSON."""

    def __init__(self, source: Described, lines: bool, *arguments: Any, **options: Any):
        from datasets import load_dataset

        self.source, self.lines, self.read = source, lines, 0
        self.files = options["data_files"] if options.get("sample_by") == "document" else None
        try:
            self.data = load_dataset(*arguments, streaming=True, **options)
        except Exception as error:  # `datasets`, the Hub's client and the network each have their own
            raise SourceError(f"{source.title} cannot be opened: {type(error).__name__}: {error}") from error

    def __iter__(self) -> Iterator[Piece]:
        source = self.source
        for record in self._records():
            self.read += 1
            if self.lines:
                if not record["text"].strip():
                    continue
                record = self._json(record["text"])
            text = record.get(source.text)
            if not isinstance(text, str):
                raise SourceError(
                    f"{source.title}, record {self.read}: expected text in the field {source.text!r}, "
                    f"got {type(text).__name__}; fields present: {', '.join(record)}"
                )
            # A JSON string may hold half a surrogate pair, which has no UTF-8.
            text = text.encode("utf-8", "replace").decode()
            key = record.get(source.id) if source.id else None
            if text:
                yield Piece(text if key is None else str(key), text, True)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "data": self.data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]
        self.data.load_state_dict(state["data"])

    def _records(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self.data
        except Exception as error:  # as above; an error of the caller is raised elsewhere
            what = self.files[self.read] if self.files else self.source.title
            raise SourceError(f"{what} cannot be read after {self.read} records: {type(error).__name__}: {error}") from error

    def _json(self, line: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{self.source.title}, line {self.read}: no JSON: {error}") from None
        if not isinstance(record, dict):
            raise SourceError(f"{self.source.title}, line {self.read}: expected an object, got {type(record).__name__}")
        return record
