"""The Python source that is on any machine with this package's dependencies: standard library and site-packages.

A document is a package: its .py files in the order of their names, each under a comment with its name. That makes long documents
(most files are short), and holding out a document holds out its package, whole. Left out: tests, tables, vendored copies, files
without text, files that were there before, and of training whatever is mostly a copy of held-out text (a fork's files).
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from needlework.fields import Inside

from .corpus import is_held_out
from .files import NOT_SOURCE
from .records import Piece, SourceError, Stream
from .sources import TextSource

VENDORED = {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party"}
LINE = 20  # characters; shorter lines occur in unrelated files


@dataclass(frozen=True, kw_only=True)
class Packages(TextSource):
    """Installed Python packages, each a document.

    held_out: a quarter of the packages' names. The largest few packages are most of the text, so the share of the bytes is
    another one; a quarter of the names is what it takes for sixteen long documents.
    roots: directories of packages; none are the running Python's own.

    >>> from needlework.data import Packages
    >>> Packages().side("json"), Packages().side("email")
    ('train', 'held_out')
    """

    kind: str = "packages"
    roots: tuple[str, ...] = ()
    held_out: Inside = 0.25

    def __post_init__(self):
        object.__setattr__(self, "roots", tuple(map(str, self.roots)))  # Path objects are taken too
        super().__post_init__()

    @property
    def title(self) -> str:
        return "the installed Python packages"

    def pinned(self) -> Packages:
        return self

    def listed(self) -> list[dict[str, Any]]:
        """The manifest's list: of each package its name, side, files, bytes, the sha256 of its text and what to install for it."""
        of = self._distributions()
        python = f"python {platform.python_version()}"
        return [
            {"name": package.name, "held_out": package.held_out, "files": len(package.files)}
            | {"bytes": package.bytes, "sha256": package.sha256, "of": of.get(package.name, python)}
            for package in self.packages
        ]

    def _distributions(self) -> dict[str, str]:
        """Package -> name and version of what it was installed with."""
        found = {}
        for distribution in metadata.distributions(path=[str(root) for root in self.directories()]):
            release = f"{distribution.name} {distribution.version}"
            files = [file for file in distribution.files or () if file.suffix == ".py"]
            found |= {file.parts[0].removesuffix(".py"): release for file in files}
        return found

    def stream(self) -> Stream:
        return PackageStream(self.packages)

    def directories(self) -> list[Path]:
        """Where the packages lie."""
        own = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        return list(dict.fromkeys(Path(root).resolve() for root in self.roots or own))

    @cached_property
    def packages(self) -> list[Package]:
        """The packages that have text, in the order of their names' sha256; FileNotFoundError for a root that is not there."""
        packages: dict[str, Package] = {}
        for root in self.directories():
            if not root.is_dir():
                raise FileNotFoundError(f"packages: no such directory: {root}")
            for path in sorted(root.rglob("*.py")):
                name = path.relative_to(root)
                if not (NOT_SOURCE | VENDORED).intersection(name.parts[:-1]) and not path.name.startswith("_sysconfigdata"):
                    top = name.parts[0].removesuffix(".py")
                    package = packages.setdefault(top, Package(top, is_held_out(top, self.held_out)))
                    package.files.append((name.as_posix(), path))
        seen: set[bytes] = set()
        lines: set[int] = set()
        for package in sorted(packages.values(), key=lambda package: not package.held_out):  # the held-out ones first
            package.choose(seen, lines)
        order = sorted(packages.values(), key=lambda package: hashlib.sha256(package.name.encode()).digest())
        return [package for package in order if package.files]


Digest = bytes  # inside Package, `bytes` is a field


@dataclass
class Package:
    """One package: its files, (name, path) each, and what its text is."""

    name: str
    held_out: bool
    files: list[tuple[str, Path]] = field(default_factory=list)
    bytes: int = 0
    sha256: str = ""

    def texts(self) -> Iterator[tuple[str, str]]:
        """(name, text) of each file, its name in a comment above it; SourceError for a file that is no text any more."""
        return ((name, _again(name, path)) for name, path in self.files)

    def choose(self, seen: set[Digest], lines: set[int]) -> None:
        """Keep the files that are text worth reading; seen: digests of files, lines: hashes of held-out lines, both added to."""
        digest, kept = hashlib.sha256(), []
        for name, path in self.files:
            text = _source(path)
            if text is None or (key := hashlib.sha256(text.encode()).digest()) in seen:
                continue
            long = {hash(line.strip()) for line in text.splitlines() if len(line.strip()) >= LINE}
            if self.held_out:
                lines |= long
            elif len(long & lines) > len(long) / 2:
                continue
            seen.add(key)
            kept.append((name, path))
            piece = _piece(name, text).encode()
            digest.update(piece)
            self.bytes += len(piece)
        self.files, self.sha256 = kept, digest.hexdigest()


class PackageStream:
    """The files of the packages, a piece each."""

    def __init__(self, packages: list[Package]):
        self.files = [
            (package, name, path, name == package.files[-1][0]) for package in packages for name, path in package.files
        ]
        self.read = 0

    def __iter__(self) -> Iterator[Piece]:
        for package, name, path, last in self.files[self.read :]:
            text = _again(name, path)
            self.read += 1
            yield Piece(package.name, text, last)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def _again(name: str, path: Path) -> str:
    """The piece of a file that was text when the packages were listed."""
    text = _source(path)
    if text is None:
        raise SourceError(f"{path} changed after the packages were listed")
    return _piece(name, text)


def _piece(name: str, text: str) -> str:
    return f"# {name}\n{text}" if text.endswith("\n") else f"# {name}\n{text}\n"


def _source(path: Path) -> str | None:
    """A file's text; None for a file that is not UTF-8, that is empty, or that is a table: more than a fifth digits."""
    data = path.read_bytes()
    digits = len(data) - len(data.translate(None, b"0123456789"))
    if b"\0" in data or not data.strip() or digits > len(data) / 5:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
