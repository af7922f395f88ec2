"""A corpus: documents as flat arrays of tokens, split into training and held-out text, with a manifest.

Order (reading.py) and split depend on names alone: a document is held out if a part of its name's sha256 falls below the share.
So the same files give the same corpus on every machine, and a file stays on its side as others come.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from needlework.fields import Count, Inside, fit
from needlework.files import write_whole

from .files import found, stdlib
from .reading import Reader
from .tokenizer import byte_ids, encode_documents, eot_id, token_dtype

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text: kind "stdlib" (the installed Python's standard library) or "files" (`paths`).

    held_out: share of the documents kept out of training, in (0, 1). max_bytes: reading stops there.

    >>> from needlework.data import CorpusConfig, byte_tokenizer, load_corpus
    >>> corpus = load_corpus(CorpusConfig(max_bytes=1 << 16), byte_tokenizer())
    >>> corpus.manifest["kind"], len(corpus.held_out) > 0
    ('stdlib', True)
    """

    kind: Literal["stdlib", "files"] = "stdlib"
    paths: tuple[str, ...] = ()
    held_out: Inside = 0.05
    max_bytes: Count = 4 << 20

    def __post_init__(self):
        object.__setattr__(self, "paths", tuple(map(str, self.paths)))  # Path objects are taken too
        fit("corpus", self)
        if (self.kind == "files") != bool(self.paths):
            raise ValueError(f'corpus: kind "{self.kind}" with {len(self.paths)} paths; paths go with "files"')


@dataclass(frozen=True)
class Documents:
    """Documents end to end: tokens [n] (uint16, or uint32 for vocabularies over 65,536), offsets [N+1] int64.

    Document i is tokens[offsets[i] : offsets[i + 1]]; its last token is the end of text. The arrays may be files' (np.memmap).
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def join(cls, parts: list[np.ndarray]) -> Documents:
        return cls(np.concatenate(parts), np.cumsum([0] + [len(p) for p in parts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def sample(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n contiguous tokens [n] int64 from a random place; they may span documents."""
        if n > len(self.tokens):
            raise ValueError(f"corpus: {n} tokens in a row are needed, but this side has only {len(self.tokens)}")
        start = rng.integers(len(self.tokens) - n + 1)
        return self.tokens[start : start + n].astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents, the tokenizer of their tokens, and a manifest of where they are from.

    others: more documents that are not trained on, by the name of their side.
    """

    train: Documents
    held_out: Documents
    tokenizer: Tokenizer
    manifest: dict
    others: dict[str, Documents] = field(default_factory=dict)

    def on(self, side: str) -> Corpus:
        """The corpus whose held-out documents are those of `side`: "held_out" or one of `others`. ValueError for a side that is not
        there."""
        if side == "held_out":
            return self
        if side not in self.others:
            raise ValueError(f"corpus: there is no side {side!r}; it has {', '.join(('held_out', *self.others))}")
        return replace(self, held_out=self.others[side])

    @cached_property
    def byte_ids(self) -> np.ndarray:
        """The token of each byte, [256] int64; ValueError if the tokenizer has none."""
        return byte_ids(self.tokenizer)

    def write_manifest(self, path: str | Path) -> None:
        """Write the manifest as JSON; the file is replaced at once or not at all."""
        write_whole(Path(path), json.dumps(self.manifest, indent=1) + "\n")


def load_corpus(config: CorpusConfig, tokenizer: Tokenizer) -> Corpus:
    """Read, tokenise and split the files of a config.

    Every document ends in the tokenizer's end of text. Empty documents and repeated ones are left out and counted. A file that is not
    text, or cannot be read, is skipped and listed in the manifest, which also says what `max_bytes` left unread. Where the split by
    name leaves a side with less than half its share (few documents), the end of the longest one is held out instead, and the manifest
    says so.
    Raises FileNotFoundError (a path), ValueError (no readable text; a record that is no JSON or has no "text").
    """
    sources = stdlib() if config.kind == "stdlib" else found(config.paths)
    reader = Reader(sources, config.max_bytes)
    documents = list(reader)
    if not documents:
        reasons = "".join(f"\n  {file['name']}: {file['reason']}" for file in reader.skipped[:10])
        raise ValueError(
            f"corpus: no readable text in {', '.join(config.paths) or 'the standard library'}; tried {len(sources)} "
            f"files as UTF-8 text, .jsonl, .json or .parquet, {len(reader.skipped)} of them are no text{reasons}"
        )
    names = [name for name, _ in documents]
    parts = _tokenise([text for _, text in documents], tokenizer)
    train, held_out, split = _split(names, parts, config.held_out)
    manifest = {
        "kind": config.kind,
        "python": platform.python_version(),
        "max_bytes": config.max_bytes,
        "sha256": _sha256_of_arrays(train.tokens, train.offsets, held_out.tokens, held_out.offsets),
        "totals": reader.totals()
        | {
            "documents": len(parts),
            "bytes": reader.bytes,
            "train_tokens": len(train.tokens),
            "held_out_tokens": len(held_out.tokens),
        },
        "split": split,
        "files": reader.listed(),
        "skipped": reader.skipped,
    }
    return Corpus(train, held_out, tokenizer, manifest)


def _tokenise(texts: list[bytes], tokenizer: Tokenizer) -> list[np.ndarray]:
    end = token_dtype(tokenizer)(eot_id(tokenizer))
    return [np.append(ids, end) for ids in encode_documents(tokenizer, [text.decode() for text in texts])]


def quantile(name: str) -> float:
    """A number in [0, 1) that a name alone decides: uniform over names."""
    # The last 8 bytes of the digest: files are *ordered* by its first ones.
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[-8:], "big") / 2**64


def is_held_out(name: str, share: float) -> bool:
    """Whether a document stays out of training."""
    return quantile(name) < share


def _split(names: list[str], parts: list[np.ndarray], share: float) -> tuple[Documents, Documents, dict]:
    """Training and held-out documents, and what the manifest says about them."""
    held = [is_held_out(name, share) for name in names]
    total = sum(map(len, parts))
    held_tokens = sum(len(part) for part, out in zip(parts, held, strict=True) if out)
    if held_tokens >= share * total / 2 and total - held_tokens >= (1 - share) * total / 2:
        train = [part for part, out in zip(parts, held, strict=True) if not out]
        held_out = [part for part, out in zip(parts, held, strict=True) if out]
        names = [name for name, out in zip(names, held, strict=True) if out]
        return Documents.join(train), Documents.join(held_out), {"by": "name", "share": share, "held_out": names}
    longest = max(range(len(parts)), key=lambda i: len(parts[i]))
    document = parts[longest]
    cut = len(document) - min(math.ceil(share * total), len(document) // 2)
    train = [*parts[:longest], document[:cut], *parts[longest + 1 :]]
    split = {"by": "end of the longest document", "share": share, "held_out": [names[longest]], "from_token": cut}
    return Documents.join(train), Documents.join([document[cut:]]), split


def _sha256_of_arrays(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
