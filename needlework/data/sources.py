"""Sources: which text a corpus has. A source is pinned to a revision, lists its files, and opens a stream; records.py reads it."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from needlework.fields import Count, Inside, fit

from .corpus import is_held_out
from .files import Source, found
from .records import Records, SourceError, Stream
from .store import SIDES, digest


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """What all sources say: which sides a corpus of theirs has, on which a document is, and where to stop.

    max_tokens counts all sides; the document that reaches it is the last one.
    """

    max_documents: Count | None = None
    max_tokens: Count | None = None

    def __post_init__(self):
        fit("source", self)

    def identity(self) -> Any:
        """JSON-ready: what two sources must share for the tokens of one to be those of the other."""
        return asdict(self)

    @property
    def stores(self) -> tuple[str, ...]:
        """The sides: "train" and "held_out", then any others."""
        return SIDES

    def side(self, key: str) -> str:
        """The side of a document: its key alone decides."""
        raise NotImplementedError

    def left(self) -> dict[str, int]:
        """For the manifest's totals: what of its files, or of its text, the source does not read."""
        return {}

    def skipped(self) -> list[dict[str, str]]:
        """The manifest's list of files without text."""
        return []

    def sides(self) -> dict[str, Any]:
        """What the manifest says of the sides."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TextSource(Bounded):
    """A source that holds out a share of its documents, by the sha256 of their keys."""

    held_out: Inside

    def holds_out(self, key: str) -> bool:
        """Whether a document stays out of training: its key alone decides."""
        return is_held_out(key, self.held_out)

    def side(self, key: str) -> str:
        return "held_out" if self.holds_out(key) else "train"

    def sides(self) -> dict[str, Any]:
        return {"by": "sha256 of the key", "share": self.held_out}


@dataclass(frozen=True, kw_only=True)
class Hub(TextSource):
    """A data set of the Hugging Face Hub: its name `path`, its configuration `name`, a revision (None: today's, which is recorded).

    text, id: the fields with a document's text and its key; a record without that id, or id None, has its text as key.
    files: URLs to read instead, `path` then being their format ("json", "parquet", "text").

    >>> from needlework.data import Hub
    >>> Hub(path="HuggingFaceFW/fineweb-edu", name="sample-10BT").title
    'the data set HuggingFaceFW/fineweb-edu (sample-10BT)'
    """

    kind: str = "hub"
    path: str
    name: str | None = None
    files: tuple[str, ...] = ()
    revision: str | None = None
    split: str = "train"
    text: str = "text"
    id: str | None = "id"
    held_out: Inside = 0.001

    @property
    def title(self) -> str:
        return (
            f"the data set {self.path}{f' ({self.name})' if self.name else ''}{f' of {self.files[0]} …' if self.files else ''}"
        )

    def pinned(self) -> Hub:
        """The same with its revision; SourceError if the Hub cannot be reached."""
        if self.revision is not None or self.files:
            return self
        from huggingface_hub import HfApi

        try:
            return replace(self, revision=HfApi().dataset_info(self.path).sha)
        except Exception as error:  # whatever the network has
            raise SourceError(f"{self.title} cannot be found: {type(error).__name__}: {error}") from error

    def listed(self) -> list[dict[str, Any]]:
        """The manifest's list of local files: none."""
        return []

    def stream(self) -> Stream:
        if self.files:
            return _of_files(self, self.path, list(self.files))
        return Records(self, False, self.path, self.name, revision=self.revision, split=self.split)


@dataclass(frozen=True, kw_only=True)
class PathSource(TextSource):
    """What sources of one's own files say: `paths` of files and directories."""

    paths: tuple[str, ...]
    held_out: Inside = 0.05

    def __post_init__(self):
        object.__setattr__(self, "paths", tuple(map(str, self.paths)))  # Path objects are taken too
        super().__post_init__()
        if not self.paths:
            raise ValueError("source: paths is empty, expected at least one file or directory")

    @property
    def title(self) -> str:
        return ", ".join(self.paths)

    def pinned(self) -> Self:
        return self


@dataclass(frozen=True, kw_only=True)
class Local(PathSource):
    """Files, or directories of files, of one format.

    .jsonl, .json (an object a line) and .parquet have a document a record, other files are a document each.
    .gz, .zst, .bz2 and .xz are read as what they hold.

    >>> from needlework.data import Local
    >>> source = Local(paths=("reviews.jsonl.gz",), text="body", max_documents=10_000)
    >>> source.held_out, source.max_documents
    (0.05, 10000)
    """

    kind: str = "local"
    text: str = "text"
    id: str | None = "id"

    def files(self) -> list[Source]:
        """FileNotFoundError names a path that is not there; ValueError for no file, or for several formats."""
        files = found(self.paths)
        formats = sorted({_format(file.path) for file in files})
        if len(formats) != 1:
            raise ValueError(f"source: files of one format are expected in {self.title}, found {', '.join(formats) or 'none'}")
        return files

    def listed(self) -> list[dict[str, Any]]:
        """The manifest's list of files: name, size, sha256."""
        return [{"name": name, "bytes": path.stat().st_size, "sha256": digest(path)} for name, path, _ in self.files()]

    def stream(self) -> Stream:
        files = self.files()
        # `datasets` takes names for patterns: one with brackets would be no file, without a word.
        return _of_files(self, _format(files[0].path), [glob.escape(str(file.path.resolve())) for file in files])


FINEWEB_EDU_10BT = Hub(path="HuggingFaceFW/fineweb-edu", name="sample-10BT")
FINEWEB_EDU_100BT = Hub(path="HuggingFaceFW/fineweb-edu", name="sample-100BT", held_out=0.0001)
FINEPDFS = Hub(path="HuggingFaceFW/finepdfs", name="eng_Latn")
# Dolma's own page is a loading script, which `datasets` no longer runs: these are the files it names, about 10B tokens.
DOLMA = Hub(
    path="json",
    files=tuple(f"https://olmo-data.org/dolma-v1_6-8B-sample/v1_5r2_sample-{i:04}.json.gz" for i in range(103)),
)


def _of_files(source: Hub | Local, kind: str, files: list[str]) -> Stream:
    match kind:
        # Lines of JSON are read as text: the library's own reader takes the fields of the first records for those of all.
        case "json":
            return Records(source, True, "text", data_files=files, split="train", sample_by="line")
        case "text":
            return Records(source, False, "text", data_files=files, split="train", sample_by="document")
        case _:
            return Records(source, False, kind, data_files=files, split="train")


def _format(path: Path) -> str:
    names = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    compressed = path.suffix in (".gz", ".zst", ".bz2", ".xz")
    return names.get(path.with_suffix("").suffix if compressed else path.suffix, "text")
