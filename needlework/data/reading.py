"""Reading files in a fixed order, each document once, up to a number of bytes; and what was read, and what was left.

Files come in the order of the sha256 of their relative name (the standard library's alphabet would start with `abc` and `ast`).
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import Source, Unreadable, documents


class Reader:
    """The distinct, non-empty documents of `sources`, (name, UTF-8 text), no more than `max_bytes` of text (None: all).

    Goes through its files once. Afterwards `listed`, `skipped` and `totals` say what became of each.
    Raises OSError for a path that was given itself; any other file that cannot be read is skipped. ValueError as in `documents`.
    """

    def __init__(self, sources: list[Source], max_bytes: int | None = None):
        self.sources = sorted(
            sources, key=lambda source: hashlib.sha256(source.name.encode("utf-8", "surrogateescape")).digest()
        )
        self.room = max_bytes
        self.read: list[tuple[Source, int, int]] = []  # a file, its documents, and bytes of them
        self.skipped: list[dict[str, str]] = []
        self.opened: set[Path] = set()
        self.seen: set[bytes] = set()
        self.bytes = self.empty = self.repeated = 0
        self.cut: Source | None = None  # the file that was not read to its end

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for source in self.sources:
            count, size = len(self.seen), self.bytes
            self.opened.add(source.path)
            try:
                for name, text in documents(source, self.room):
                    if self._full():
                        self.cut = source
                        break
                    yield from self._distinct(source, name, text)
            except (Unreadable, OSError) as error:
                if source.given and isinstance(error, OSError):
                    raise
                self.skipped.append({"name": source.name, "reason": str(error)})
                if len(self.seen) == count:
                    continue
            self.read.append((source, len(self.seen) - count, self.bytes - size))
            if self._full():
                return

    def _full(self) -> bool:
        return self.room is not None and self.room <= 0

    def _distinct(self, source: Source, name: str, text: bytes) -> Iterator[tuple[str, bytes]]:
        """The document, unless it was there; as much of it as there is room for."""
        if self.room is not None and len(text) > self.room:
            text, self.room, self.cut = text[: self.room].decode("utf-8", "ignore").encode(), 0, source
        key = hashlib.sha256(text).digest()
        if not text:
            self.empty += self.cut is None
        elif key in self.seen:
            self.repeated += 1
        else:
            self.seen.add(key)
            self.bytes += len(text)
            if self.room is not None:
                self.room -= len(text)
            yield name, text

    def listed(self) -> list[dict[str, Any]]:
        """The files that were read: name, bytes on disk, sha256, documents; "read" is the bytes of text taken of the one that was cut."""
        entries = []
        for source, count, size in self.read:
            with source.path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            entry = {"name": source.name, "bytes": source.path.stat().st_size, "sha256": sha256, "documents": count}
            entries.append(entry | ({"read": size} if source is self.cut else {}))
        return entries

    def totals(self) -> dict[str, int]:
        """Files read, of them cut, skipped, not opened; the bytes on disk of what was not read; documents empty and repeated."""
        unread = [source.path for source in self.sources if source.path not in self.opened]
        left = sum(path.stat().st_size for path in unread if path.exists())  # a link may lead nowhere
        left += sum(max(0, source.path.stat().st_size - size) for source, _, size in self.read if source is self.cut)
        return {
            "files": len(self.read),
            "files_cut": int(self.cut is not None),
            "files_skipped": len(self.skipped),
            "files_left_unread": len(unread),
            "bytes_left_unread": left,
            "documents_empty": self.empty,
            "documents_repeated": self.repeated,
        }


def text_read(manifest: dict[str, Any]) -> str:
    """One line of a corpus's manifest: what was read, and all that was not."""
    totals = manifest["totals"]
    left = []
    ends = [
        "the end of one" if totals.get("files_cut") else "",
        _many(n, "file") if (n := totals.get("files_left_unread")) else "",
    ]
    if any(ends):
        left.append(f"left unread: {' and '.join(filter(None, ends))}, {_mebibytes(totals['bytes_left_unread'])}")
    if skipped := manifest.get("skipped"):
        names = ", ".join(entry["name"] for entry in skipped[:3]) + (" …" if len(skipped) > 3 else "")
        left.append(f"{_many(len(skipped), 'file')} skipped, no text: {names}")
    if totals.get("documents_repeated"):
        left.append(f"{_many(totals['documents_repeated'], 'document')} left out, repeated")
    if totals.get("stopped_by"):
        left.append(f"stopped at {totals['stopped_by']}")
    return "; ".join([f"{_many(totals['files'], 'file')}, {_mebibytes(totals['bytes'])} of text", *left])


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 / 20 else f"{count:,} bytes"
