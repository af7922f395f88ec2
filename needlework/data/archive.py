"""An archive: the documents of many packages in one compressed file, each on its side, as `gather.py` writes it.

    <folder>/documents.jsonl.xz    {"package", "name", "side", "text"} a line
             manifest.json         the file's sha256; of each package what it was, its licence, its documents and bytes by side

It travels to machines without a network, which tokenise it there.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from needlework.json_file import read_json

from .records import Piece, SourceError, Stream
from .sources import Bounded
from .store import SIDES, digest

DOCUMENTS, MANIFEST = "documents.jsonl.xz", "manifest.json"
OTHERS = ("development", "other")  # held-out documents to choose by, and the packages of which nothing is trained on


@dataclass(frozen=True, kw_only=True)
class Archive(Bounded):
    """The documents of an archive in the folder `path`, each on the side that the archive says.

    sha256: the file's; None: whatever is there. Another file is refused.

    >>> from needlework.data import Archive
    >>> Archive(path="gathered").stores
    ('train', 'held_out', 'development', 'other')
    """

    kind: str = "archive"
    path: str
    sha256: str | None = None

    @property
    def title(self) -> str:
        return f"the archive {self.path}"

    @property
    def stores(self) -> tuple[str, ...]:
        return SIDES + OTHERS

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """SourceError for a folder without an archive, and for a file that is not the manifest's or not `sha256`'s."""
        file = Path(self.path) / DOCUMENTS
        if not file.exists():
            raise SourceError(f"{self.title}: there is no {file}; `needlework gather --to {self.path}` makes it")
        manifest, found = read_json(Path(self.path) / MANIFEST), digest(file)
        for wanted, of in ((manifest["sha256"], "its manifest"), (self.sha256, "the recipe")):
            if wanted is not None and wanted != found:
                raise SourceError(f"{self.title}: {file} has the sha256 {found[:16]}…, {of} says {wanted[:16]}…: another text")
        return manifest

    def pinned(self) -> Archive:
        return self

    def side(self, key: str) -> str:
        return key.partition(":")[0]

    def sides(self) -> dict[str, Any]:
        return self.manifest["split"]

    def listed(self) -> list[dict[str, Any]]:
        """The manifest's list: of each package what it was, its licence, its documents and bytes by side."""
        return self.manifest["packages"]

    def left(self) -> dict[str, int]:
        """Bytes that were left out when it was gathered, by why."""
        return {f"bytes_{why}": size for why, size in self.manifest["left_out"].items()}

    def stream(self) -> Stream:
        return ArchiveStream(self)


class ArchiveStream:
    """The documents, a piece each; the key is side:package/name."""

    def __init__(self, source: Archive):
        self.path, self.read = Path(source.path) / DOCUMENTS, 0

    def __iter__(self) -> Iterator[Piece]:
        with lzma.open(self.path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number >= self.read:
                    record = json.loads(line)
                    self.read = number + 1
                    yield Piece(f"{record['side']}:{record['package']}/{record['name']}", record["text"], True)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]
