"""Text of Debian packages: downloaded by apt-get, unpacked by dpkg-deb, read by what is known of each. Nothing is installed.

<folder>/<name>_<version>_<architecture>.deb      as apt-get leaves it
        /<name>/                                  what is in it
"""

import gzip
import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .markup import gcide_entries, html_text, pod_text, verses, wordnet_lines
from .records import SourceError

COMPRESSED = b"\x1f\x9d"  # compress(1); gzip reads it
SYNSETS = 200  # a document of WordNet has so many, of one lexicographer file


class Known(NamedTuple):
    """What is known of a package: the licence of its text, words that its copyright file says it in, and how its text is read.

    read: (the unpacked folder) -> (document's name, text).
    """

    licence: str
    said: tuple[str, ...]
    read: Callable[[Path], Iterator[tuple[str, str]]]


class Deb(NamedTuple):
    """An unpacked package: name, version, the sha256 of the .deb and of its copyright file, the licence, the folder."""

    name: str
    version: str
    sha256: str
    copyright_sha256: str
    licence: str
    folder: Path


def unpacked(name: str, folder: Path) -> Deb:
    """The package `name` in `folder`, downloaded if no .deb of it is there.

    SourceError for a package that is not known here, that cannot be had, or whose copyright file does not say its licence.
    """
    if name not in KNOWN:
        raise SourceError(f"debian: {name} is not known here; known: {', '.join(KNOWN)}")
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(folder.glob(f"{name}_*.deb"))):
        _run(["apt-get", "download", name], folder)
        found = sorted(folder.glob(f"{name}_*.deb"))
    if len(found) != 1:
        raise SourceError(f"debian: {folder} has {len(found)} packages {name}, expected one")
    _run(["dpkg-deb", "-x", found[0].name, name], folder)
    version = _run(["dpkg-deb", "-f", found[0].name, "Version"], folder).decode().strip()
    said = _plain(folder / name / "usr/share/doc" / name / "copyright")
    return Deb(name, version, _digest(found[0].read_bytes()), _digest(said.encode()), licence_of(name, said), folder / name)


def licence_of(name: str, said: str) -> str:
    """The licence of a package's text; SourceError if its copyright file no longer says so."""
    known, text = KNOWN[name], " ".join(said.split())
    if missing := [words for words in known.said if words not in text]:
        raise SourceError(
            f"debian: the copyright file of {name} does not say {missing[0]!r}; read it, {known.licence} may not hold"
        )
    return known.licence


def texts(deb: Deb) -> Iterator[tuple[str, str]]:
    """(document's name, text), in the order of names; SourceError for a package without text."""
    documents = sorted(KNOWN[deb.name].read(deb.folder))
    if not documents:
        raise SourceError(f"debian: {deb.name} {deb.version} has no text where it was known to be")
    return iter(documents)


def _run(command: list[str], folder: Path) -> bytes:
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise SourceError(f"debian: {' '.join(command)} failed: {error}{said.decode(errors='replace')[-400:]}") from error


def _plain(path: Path) -> str:
    """A text file, compressed or not. What is no UTF-8 is a replacement character: two bytes of GCIDE."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix in (".gz", ".dz") else data).decode(errors="replace")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pages(under: str, without: tuple[str, ...] = ()) -> Callable[[Path], Iterator[tuple[str, str]]]:
    def read(folder: Path) -> Iterator[tuple[str, str]]:
        for path in sorted((folder / under).rglob("*.html")) + sorted((folder / under).rglob("*.html.gz")):
            name = path.relative_to(folder / under).as_posix()
            if not name.startswith(without):
                yield name, html_text(_plain(path))

    return read


def _pods(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.pod")):
        if path.name != "perltoc.pod":  # the others' headings
            yield path.name, pod_text(_plain(path))


def _gcide(folder: Path) -> Iterator[tuple[str, str]]:
    """A document holds the entries whose headwords begin with the same two letters."""
    documents: dict[str, list[str]] = defaultdict(list)
    for head, text in gcide_entries(_plain(folder / "usr/share/dictd/gcide.dict.dz")):
        letters = "".join(c for c in head.lower() if c.isascii() and c.isalpha())[:2]
        documents[letters or "other"].append(text)
    for letters, entries in documents.items():
        yield letters, "\n".join(entries)


def _wordnet(folder: Path) -> Iterator[tuple[str, str]]:
    for kind in ("noun", "verb", "adj", "adv"):
        files: dict[int, list[str]] = defaultdict(list)
        for file, line in wordnet_lines(_plain(folder / f"usr/share/wordnet/data.{kind}")):
            files[file].append(line)
        for file, lines in files.items():
            for start in range(0, len(lines), SYNSETS):
                yield f"{kind}.{file:02}.{start:06}", "".join(lines[start : start + SYNSETS])


def _bible(folder: Path) -> Iterator[tuple[str, str]]:
    data = (folder / "usr/lib/bible.data").read_bytes()
    stream = subprocess.run(["gzip", "-dc"], input=data[data.index(COMPRESSED) :], capture_output=True, check=True).stdout
    yield from verses(stream.decode())


_GPL2 = "either version 2 of the License, or (at your option) any later version"
KNOWN = {
    "anarchism": Known("GPL-2+", (_GPL2,), _pages("usr/share/doc/anarchism/html")),
    "bible-kjv-text": Known(
        "the text is out of copyright; the package GPL-2+",
        ("The copyright for the King James Version text of the Bible is expired", "GPL version 2 or later"),
        _bible,
    ),
    "dict-gcide": Known(
        "GPL-2+", ("GCIDE is free software", "either version 2, or (at your option) any later version"), _gcide
    ),
    "perl-doc": Known("GPL-1+ or Artistic", ("License: GPL-1+ or Artistic",), _pods),
    "postgresql-doc-15": Known("PostgreSQL", ("License: PostgreSQL",), _pages("usr/share/doc/postgresql-doc-15/html")),
    "python3.11-doc": Known(
        "PSF-2.0",
        ("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",),
        _pages("usr/share/doc/python3.11/html", ("contents", "genindex", "search", "py-modindex", "_")),
    ),
    "wordnet-base": Known("WordNet-3.0", ("License: WordNet3.0",), _wordnet),
}
