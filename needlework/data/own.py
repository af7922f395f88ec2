"""A source of the user's own files: text, .jsonl, .json and .parquet side by side. Each document is read once; files without text are
left out and listed.

Needs no library for plain text and JSON. What is known of the files (which are read, what is held out) comes of going through them
once before the text is streamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .files import found
from .reading import Reader
from .records import Piece, SourceError, Stream
from .sources import PathSource, TextSource

TAIL = " (end)"


@dataclass(frozen=True, kw_only=True)
class Files(PathSource):
    """The documents of `paths`: a text file is one, of .jsonl, .json and .parquet every record is one (its "text").

    held_out: a share of the documents by name. Where that leaves a side with less than half its share (few documents), the end of the
    longest one is held out instead, as a document of its own.

    >>> from needlework.data import Files, StoreConfig
    >>> StoreConfig(source=Files(paths=("chapters", "notes.jsonl")), vocabulary=8_192).source.title
    'chapters, notes.jsonl'
    """

    kind: str = "files"

    def identity(self) -> Any:
        """With the digests of the files: another text under the same names is another source."""
        return [super().identity(), self.listed()]

    @cached_property
    def survey(self) -> Survey:
        """FileNotFoundError names a path that is not there; ValueError for files without any text."""
        return Survey(self)

    def listed(self) -> list[dict[str, Any]]:
        """The manifest's list of files that are read: name, size, sha256, documents."""
        return self.survey.files

    def left(self) -> dict[str, Any]:
        return self.survey.totals

    def skipped(self) -> list[dict[str, str]]:
        """The manifest's list of files that are not, with the reason of each."""
        return self.survey.skipped

    def sides(self) -> dict[str, Any]:
        if self.survey.longest is None:
            return super().sides()
        return {"by": "end of the longest document", "share": self.held_out, "from_byte": self.survey.cut}

    def holds_out(self, key: str) -> bool:
        return super().holds_out(key) if self.survey.longest is None else key == self.survey.longest + TAIL

    def stream(self) -> Stream:
        return FileStream(self)


class Survey:
    """What going through a source's files finds: `files`, `skipped` and `totals` of the manifest, and what is held out.

    longest: the document whose bytes from `cut` on are held out; None where the names decide.
    """

    def __init__(self, source: Files):
        reader = Reader(found(source.paths))
        total = held = size = 0
        name = ""
        for key, text in reader:
            total += len(text)
            held += len(text) * TextSource.holds_out(source, key)
            if len(text) > size:
                name, size = key, len(text)
        self.files, self.skipped, self.totals = reader.listed(), reader.skipped, reader.totals()
        if not total:
            reasons = "".join(f"\n  {file['name']}: {file['reason']}" for file in self.skipped[:10])
            raise ValueError(f"source: no readable text in {source.title}; {len(self.skipped)} files are no text{reasons}")
        share = source.held_out
        by_name = share * total / 2 <= held and (1 - share) * total / 2 <= total - held
        self.longest = None if by_name else name
        self.cut = size - min(math.ceil(share * total), size // 2)


class FileStream:
    """The documents, a piece each; of the longest two where its end is held out."""

    def __init__(self, source: Files):
        self.source, self.read = source, 0

    def __iter__(self) -> Iterator[Piece]:
        survey, reader = self.source.survey, Reader(found(self.source.paths))
        for place, piece in enumerate(self._pieces(survey, reader)):
            if place >= self.read:
                self.read = place + 1
                yield piece
        if reader.listed() != survey.files:
            raise SourceError(f"{self.source.title} changed while it was read")

    def _pieces(self, survey: Survey, reader: Reader) -> Iterator[Piece]:
        for name, text in reader:
            if name != survey.longest:
                yield Piece(name, text.decode(), True)
                continue
            head = text[: survey.cut].decode("utf-8", "ignore")  # not in the middle of a character
            yield Piece(name, head, True)
            yield Piece(name + TAIL, text[len(head.encode()) :].decode(), True)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]
