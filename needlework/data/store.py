"""A store: documents tokenised once, one after the other in memory-mapped files. A corpus may be larger than memory.

    tokens.bin     uint16, or uint32 for vocabularies over 65,536      [n]
    offsets.npy    int64: document i is tokens[offsets[i] : offsets[i + 1]]      [N + 1]
    manifest.json  what it holds, with the digests of both; written last, so a directory without one is unfinished

A corpus is two of them, train/ and held_out/, and any others that its source holds apart, with a tokenizer.json and a manifest.json of
its own.
preparation.py fills a store from a source.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from needlework.files import write_whole
from needlework.json_file import read_json

from .corpus import Corpus, Documents
from .tokenizer import load_tokenizer

TOKENS, OFFSETS, MANIFEST = "tokens.bin", "offsets.npy", "manifest.json"
SIDES, TOKENIZER = ("train", "held_out"), "tokenizer.json"
ENDS = "ends.bin"  # offsets.npy without its header, while it grows


class StoreError(RuntimeError):
    """A store that is unfinished, damaged or another's; the message names the directory and what to do."""


class Writer:
    """Appends documents to an unfinished store, from `tokens` tokens and `documents` documents on; what is behind them is cut off.

    StoreError if the files hold less than that.
    """

    def __init__(self, directory: Path, dtype: type[np.unsignedinteger], tokens: int = 0, documents: int = 0):
        self.directory, self.dtype = directory, np.dtype(dtype)
        self.tokens, self.documents = tokens, documents
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).unlink(missing_ok=True)
        self._tokens = _opened(directory / TOKENS, tokens * self.dtype.itemsize)
        self._ends = _opened(directory / ENDS, documents * 8)

    def write(self, tokens: np.ndarray, ends: bool) -> None:
        """Append tokens [n]; with `ends` they are the last ones of their document."""
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.tokens += len(tokens)
        if ends:
            self._ends.write(np.int64(self.tokens).tobytes())
            self.documents += 1

    def sync(self) -> dict[str, int]:
        """Wait until all is on the disk; the counts from which a Writer can go on."""
        for file in (self._tokens, self._ends):
            file.flush()
            os.fsync(file.fileno())
        return {"tokens": self.tokens, "documents": self.documents}

    def finish(self) -> dict[str, Any]:
        """Make it a store; its manifest. It can be done again until `forget_ends`. StoreError if it holds no document."""
        if self.documents == 0:
            raise StoreError(f"store {self.directory}: no document came to this side; change the share that is held out")
        counts = self.sync()
        self.close()
        ends = np.memmap(self.directory / ENDS, np.int64, "r")
        offsets = np.lib.format.open_memmap(self.directory / OFFSETS, "w+", np.int64, (self.documents + 1,))
        offsets[0], offsets[1:] = 0, ends
        offsets.flush()
        del offsets
        digests = {f"{name}_sha256": digest(self.directory / file) for name, file in _FILES}
        manifest = {"dtype": self.dtype.name} | counts | digests
        write_whole(self.directory / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        return manifest

    def forget_ends(self) -> None:
        (self.directory / ENDS).unlink()

    def close(self) -> None:
        self._tokens.close()
        self._ends.close()


def open_store(directory: str | Path) -> tuple[Documents, dict[str, Any]]:
    """The documents of a finished store, mapped and not read, and its manifest; StoreError if a file's size is wrong."""
    directory = Path(directory)
    try:
        manifest = read_json(directory / MANIFEST)
    except FileNotFoundError:
        raise StoreError(f"store {directory}: unfinished, it has no {MANIFEST}; prepare it again, which goes on") from None
    dtype = np.dtype(manifest["dtype"])
    size = _size(directory / TOKENS)
    if size != manifest["tokens"] * dtype.itemsize:
        raise StoreError(f"store {directory}: {TOKENS} has {size} bytes, {manifest['tokens']} tokens of {dtype} were written")
    try:
        offsets = np.load(directory / OFFSETS, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise StoreError(f"store {directory}: {OFFSETS} cannot be read: {error}") from error
    if offsets.shape != (manifest["documents"] + 1,):
        raise StoreError(
            f"store {directory}: {OFFSETS} has shape {offsets.shape}, {manifest['documents']} documents were written"
        )
    return Documents(np.memmap(directory / TOKENS, dtype, "r"), offsets), manifest


def verify_store(directory: str | Path) -> None:
    """Read the whole store and compare its digests; StoreError names the file that is not what was written."""
    directory = Path(directory)
    _, manifest = open_store(directory)
    for name, file in _FILES:
        if digest(directory / file) != manifest[f"{name}_sha256"]:
            raise StoreError(f"store {directory}: {file} does not match its sha256; remove the directory and prepare it again")


def open_corpus(directory: str | Path) -> Corpus:
    """A finished corpus, its tokens mapped and not read; StoreError if it is unfinished or a file has the wrong size."""
    directory = Path(directory)
    if not (directory / MANIFEST).exists():
        raise StoreError(f"corpus {directory}: unfinished, it has no {MANIFEST}; prepare it again, which goes on")
    manifest = read_json(directory / MANIFEST)
    train, held_out, *others = (open_store(directory / side)[0] for side in manifest["stores"])
    names = [side for side in manifest["stores"] if side not in SIDES]
    return Corpus(train, held_out, load_tokenizer(directory / TOKENIZER), manifest, dict(zip(names, others, strict=True)))


def verify_corpus(directory: str | Path) -> None:
    """Read all of a finished corpus and compare every digest; StoreError names the file that is not what was written."""
    directory = Path(directory)
    manifest = open_corpus(directory).manifest
    if digest(directory / TOKENIZER) != manifest["tokenizer"]["sha256"]:
        raise StoreError(f"corpus {directory}: {TOKENIZER} does not match its sha256")
    for side in manifest["stores"]:
        verify_store(directory / side)


_FILES = (("tokens", TOKENS), ("offsets", OFFSETS))


def _opened(path: Path, size: int):
    """The file for appending, cut to `size` bytes."""
    there = path.stat().st_size if path.exists() else 0
    if there < size:
        raise StoreError(f"store {path.parent}: {path.name} has {there} bytes, {size} were written before")
    file = path.open("ab")
    file.truncate(size)
    return file


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
