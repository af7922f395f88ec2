"""Packages of documents to one archive: each document once, no package more than a share of the text, sides by name.

Which documents are left out, in this order:

    repeated    what equals a document before it, but for white space
    copies      more than half of whose long lines are in documents before it; documents that are not trained on come first
    capped      of a package over `share` of all bytes that are kept, those whose names come last by their sha256
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from needlework.files import write_whole

from .archive import DOCUMENTS, MANIFEST, OTHERS
from .corpus import quantile
from .debian import Deb, texts
from .packages import LINE, Packages
from .store import SIDES, digest

ALL = SIDES + OTHERS


class Gathered(NamedTuple):
    """A package: its name, what it is (the release), the licence of its text, and its documents, (name, text) each."""

    name: str
    of: str
    licence: str
    documents: list[tuple[str, str]]


class Split(NamedTuple):
    """The sides: shares of the documents that are held out and kept for development, and the packages that are no part of training."""

    held_out: float
    development: float
    other: tuple[str, ...] = ()

    def side(self, package: str, name: str) -> str:
        """The names alone decide, so a document stays on its side as others come."""
        if package in self.other:
            return "other"
        place = quantile(f"{package}/{name}")
        return "held_out" if place < self.held_out else "development" if place < self.held_out + self.development else "train"


class Document(NamedTuple):
    package: str
    name: str
    side: str
    text: str


def gather(
    packages: Iterable[Gathered],
    folder: Path,
    split: Split,
    share: float,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Writes the archive of the packages in `folder`, and returns its manifest; equal packages give equal bytes.

    share: the most that one package may be of the text's bytes.
    """
    packages = sorted(packages, key=lambda package: hashlib.sha256(package.name.encode()).digest())
    documents = [
        Document(p.name, name, split.side(p.name, name), text) for p in packages for name, text in p.documents if text.strip()
    ]
    tell(f"{len(packages)} packages, {len(documents):,} documents, {sum(_size(d) for d in documents):,} bytes")
    left: Counter[str] = Counter()
    documents = _capped(_once(documents, left), share, left)
    tell(f"{len(documents):,} documents are kept; left out, in bytes: {dict(left)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DOCUMENTS
    with lzma.open(path, "wt", preset=9 | lzma.PRESET_EXTREME, encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")
    manifest = {
        "sha256": digest(path),
        "bytes": path.stat().st_size,
        "split": {"by": "sha256 of package and name"} | split._asdict(),
        "share": share,
        "left_out": dict(left),
        "packages": [_listed(package, [d for d in documents if d.package == package.name]) for package in packages],
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    tell(f"{path}: {manifest['bytes']:,} bytes")
    return manifest


def of_debian(debs: Iterable[Deb]) -> Iterator[Gathered]:
    """Unpacked Debian packages."""
    for deb in debs:
        of = f"{deb.name} {deb.version} (Debian), {deb.sha256}"
        yield Gathered(deb.name, of, f"{deb.licence}; copyright file {deb.copyright_sha256[:16]}", list(texts(deb)))


def of_python(source: Packages, without: tuple[str, ...] = ()) -> Iterator[Gathered]:
    """Installed Python packages but `without`, a document a file, with the licence that their metadata say. What an editable install
    adds holds a path of this machine, and is left out."""
    licences = {
        f"{distribution.name} {distribution.version}": _licence(distribution.metadata)
        for distribution in metadata.distributions(path=[str(root) for root in source.directories()])
    }
    for listed, package in zip(source.listed(), source.packages, strict=True):
        if package.name in without or package.name.startswith("__editable__"):
            continue
        yield Gathered(package.name, listed["of"], licences.get(listed["of"], "PSF-2.0"), list(package.texts()))


def _licence(of: metadata.PackageMetadata) -> str:
    """The expression; else the field, where it is a name; else the classifiers; else that none is said."""
    expressions, fields = (of.get_all(name) or [] for name in ("License-Expression", "License"))
    named = [field for field in fields if field.strip() and "\n" not in field and field != "UNKNOWN"]
    classifiers = [line.rpartition(" :: ")[2] for line in of.get_all("Classifier") or () if line.startswith("License ::")]
    return ", ".join(expressions or named or classifiers) or "not said in its metadata"


def _size(document: Document) -> int:
    return len(document.text.encode())


def _once(documents: list[Document], left: Counter[str]) -> list[Document]:
    """Without repetitions and copies; in the order in which they came."""
    seen: set[bytes] = set()
    lines: set[int] = set()
    kept: set[tuple[str, str]] = set()
    for document in sorted(documents, key=lambda d: d.side == "train"):
        key = hashlib.sha256(" ".join(document.text.split()).encode()).digest()
        long = {hash(line) for line in map(str.strip, document.text.splitlines()) if len(line) >= LINE}
        if key in seen or len(long & lines) > len(long) / 2:
            left["repeated" if key in seen else "copies"] += _size(document)
            continue
        seen.add(key)
        lines |= long
        kept.add((document.package, document.name))
    return [document for document in documents if (document.package, document.name) in kept]


def _capped(documents: list[Document], share: float, left: Counter[str]) -> list[Document]:
    """No package over `share` of what is kept. ValueError for fewer packages than share that."""
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.package] += _size(document)
    if share * len(sizes) < 1:
        raise ValueError(
            f"gather: expected packages of at most {share:g} of the text each, which {len(sizes)} packages cannot be"
        )
    most = float(max(sizes.values()))
    while (lower := share * sum(min(size, most) for size in sizes.values())) < most - 1:
        most = lower  # it falls until the largest packages are `share` of what is kept
    spent: Counter[str] = Counter()
    kept = set()
    for document in sorted(documents, key=lambda d: hashlib.sha256(f"{d.package}/{d.name}".encode()).digest()):
        if spent[document.package] + _size(document) <= most:
            spent[document.package] += _size(document)
            kept.add((document.package, document.name))
        else:
            left["capped"] += _size(document)
    return [document for document in documents if (document.package, document.name) in kept]


def _listed(package: Gathered, documents: list[Document]) -> dict[str, Any]:
    """A package's entry in the manifest: what was kept of it."""
    text = hashlib.sha256("".join(f"{d.side}:{d.name}\n{d.text}" for d in documents).encode()).hexdigest()
    of = lambda side: [_size(d) for d in documents if d.side == side]
    return {
        "name": package.name,
        "of": package.of,
        "licence": package.licence,
        "files": len(documents),
        "bytes": sum(map(_size, documents)),
        "sha256": text,
        "held_out": bool(of("other")),
        "sides": {side: {"files": len(of(side)), "bytes": sum(of(side))} for side in ALL if of(side)},
    }
