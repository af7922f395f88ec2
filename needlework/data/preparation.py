"""Writes a source to disk as a corpus. A call that was stopped, even by a kill, is resumed by the same call.

    <directory>/config.json      what is made here, and the revision that was found
                tokenizer.json   trained on the training side, or given
                train/  held_out/    a store each
                progress.json    while tokenising: counts of the stores and the place in the stream that belongs to them
                manifest.json    written last: the corpus is finished

Text is read in chunks; after each the stores are synced and progress.json is replaced, so a kill loses at most a chunk.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from needlework.fields import Count, fit
from needlework.files import write_whole
from needlework.json_file import read_json

from .archive import Archive
from .bpe import train_tokenizer
from .corpus import Corpus
from .own import Files
from .packages import Packages
from .records import Piece, SourceError
from .sources import Hub, Local
from .store import MANIFEST, TOKENIZER, StoreError, Writer, digest, open_corpus
from .tokenizer import byte_tokenizer, encode_documents, eot_id, load_tokenizer, token_dtype

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, PROGRESS = "config.json", "progress.json"
CHUNK = 8 << 20  # characters tokenised at once: seconds of work
Source = Hub | Local | Files | Packages | Archive


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """A corpus to prepare: the tokens of a source.

    tokenizer: "bytes", a file, a directory, or a name on the Hugging Face Hub; None trains one of `vocabulary` tokens on the first
    `tokenizer_bytes` of the training side.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from needlework.data import Files, StoreConfig, prepare
    >>> with TemporaryDirectory() as folder:
    ...     text = Path(folder, "text.txt")
    ...     written = text.write_text("a needle in a haystack. " * 100)
    ...     corpus = prepare(StoreConfig(source=Files(paths=(text,)), tokenizer="bytes"), Path(folder, "corpus"))
    ...     corpus.tokenizer.get_vocab_size()
    257
    """

    kind: str = "store"
    source: Source
    tokenizer: str | None = None
    vocabulary: int = 16_384
    tokenizer_bytes: Count = 256 << 20

    def __post_init__(self):
        fit("store", self)
        if self.tokenizer is None and self.vocabulary < 257:
            raise ValueError(f"store: vocabulary is {self.vocabulary}, expected at least 257: 256 bytes and the end of text")


class Prepared(NamedTuple):
    """How far it is: stage "tokenizer" (reading for it) or "tokens"; documents, tokens and bytes so far; documents taken over."""

    stage: str
    documents: int
    tokens: int
    bytes: int
    taken_over: int


def prepare(
    config: StoreConfig, directory: str | Path, on_progress: Callable[[Prepared], None] = lambda progress: None
) -> Corpus:
    """The corpus of `config` in `directory`: opened if it is finished, else made, from where an earlier call was stopped.

    Processes that call it at once wait for the first and open what it made. Where an earlier call's files cannot be gone on with,
    a warning says why and they are made again. StoreError if the directory holds another config's corpus, or a side gets no
    document; SourceError if the text cannot be read, which names the data set and leaves what is done.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        for partial in directory.rglob("*.partial"):  # of a call that was killed
            partial.unlink()
        source = _claimed(directory, config)
        if not (directory / MANIFEST).exists():
            tokenizer = _tokenizer(config, source, directory / TOKENIZER, on_progress)
            _tokenise(source, tokenizer, directory, on_progress)
    return open_corpus(directory)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    import fcntl

    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it when the process dies
        yield


def _claimed(directory: Path, config: StoreConfig) -> Source:
    """The source with the revision of the first call; StoreError if the directory is another config's."""
    path = directory / CONFIG
    wanted = json.loads(json.dumps(asdict(config)))
    if not path.exists():
        source = config.source.pinned()
        write_whole(path, json.dumps({"config": wanted, "revision": getattr(source, "revision", None)}, indent=1) + "\n")
        return source
    there = read_json(path)
    flat = lambda c: c["source"] | {name: value for name, value in c.items() if name != "source"}
    a, b = flat(there["config"]), flat(wanted)
    if different := sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)):
        raise StoreError(
            f"corpus {directory}: made with another {', '.join(different)}; choose another directory, or remove it"
        )
    return replace(config.source, revision=there["revision"]) if isinstance(config.source, Hub) else config.source


def _tokenizer(config: StoreConfig, source: Source, path: Path, on_progress: Callable) -> Tokenizer:
    if not path.exists():
        match config.tokenizer:
            case None:
                tokenizer = train_tokenizer(_training_text(config, source, on_progress), config.vocabulary)
            case "bytes":
                tokenizer = byte_tokenizer()
            case given:
                tokenizer = load_tokenizer(given) if Path(given).exists() else _hub_tokenizer(given)
        eot_id(tokenizer)
        write_whole(path, tokenizer.to_str(pretty=True))
    return load_tokenizer(path)


def _training_text(config: StoreConfig, source: Source, on_progress: Callable) -> Iterator[str]:
    documents = size = 0
    for piece in source.stream():
        if source.side(piece.key) != "train":
            continue
        before = size
        documents += piece.ends
        size += len(piece.text.encode())
        yield piece.text
        if size // CHUNK > before // CHUNK:
            on_progress(Prepared("tokenizer", documents, 0, size, 0))
        if size >= config.tokenizer_bytes or documents == source.max_documents:
            return


def _hub_tokenizer(name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # whatever the network has
        raise SourceError(f"tokenizer: {name} is no file here, and the Hub does not give it: {error}") from error


def _tokenise(source: Source, tokenizer: Tokenizer, directory: Path, on_progress: Callable):
    """The stores and the manifest."""
    listed = source.listed()
    made_of = {"files": hashlib.sha256(json.dumps(listed).encode()).hexdigest(), "tokenizer": digest(directory / TOKENIZER)}
    progress, writers = _taken_over(directory, source.stores, made_of, token_dtype(tokenizer))
    of_side = dict(zip(source.stores, writers, strict=True))
    stream = source.stream()
    if progress["stream"] is not None:
        stream.load_state_dict(progress["stream"])
    before = sum(writer.documents for writer in writers)
    size, done, full = progress["bytes"], progress["done"], progress.get("full")
    end = token_dtype(tokenizer)(eot_id(tokenizer))
    chunks = _chunks(stream)
    while not done:
        chunk = next(chunks, [])
        done, full = not chunk, None
        for piece, ids in zip(chunk, encode_documents(tokenizer, [piece.text for piece in chunk]), strict=True):
            writer = of_side[source.side(piece.key)]
            writer.write(np.append(ids, end) if piece.ends else ids, piece.ends)
            size += len(piece.text.encode())
            documents, tokens = (sum(getattr(writer, name) for writer in writers) for name in ("documents", "tokens"))
            if piece.ends and (full := _full(source, documents, tokens)):
                done = True
                break
        counts = [writer.sync() for writer in writers]
        state = {"stream": stream.state_dict(), "counts": counts, "bytes": size, "done": done, "full": full}
        write_whole(directory / PROGRESS, json.dumps(made_of | state))
        documents, tokens = (sum(count[name] for count in counts) for name in ("documents", "tokens"))
        on_progress(Prepared("tokens", documents, tokens, size, before))
    stores = {side: writer.finish() for side, writer in of_side.items()}
    manifest = _manifest(source, tokenizer, made_of["tokenizer"], listed, size, stores, full)
    write_whole(directory / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    for writer in writers:
        writer.forget_ends()
    (directory / PROGRESS).unlink()


def _chunks(stream) -> Iterator[list[Piece]]:
    chunk, size = [], 0
    for piece in stream:
        chunk.append(piece)
        size += len(piece.text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _taken_over(
    directory: Path, sides: tuple[str, ...], made_of: dict[str, str], dtype: Any
) -> tuple[dict[str, Any], list[Writer]]:
    """The progress of an earlier call and the stores cut to it, or the start."""
    path = directory / PROGRESS
    start = {"stream": None, "bytes": 0, "done": False}
    if path.exists():
        try:
            progress = read_json(path)
            if different := [name for name, value in made_of.items() if progress[name] != value]:
                raise StoreError(f"{' and '.join(different)} changed since")
            return progress, [Writer(directory / side, dtype, **c) for side, c in zip(sides, progress["counts"], strict=True)]
        except (StoreError, ValueError) as error:
            warnings.warn(f"corpus {directory}: tokenised again from the start: {error}", stacklevel=4)
            path.unlink()
    return start, [Writer(directory / side, dtype) for side in sides]


def _full(source: Source, documents: int, tokens: int) -> str | None:
    """The name of the bound that a store has reached."""
    if documents == source.max_documents:
        return "max_documents"
    return "max_tokens" if source.max_tokens is not None and tokens >= source.max_tokens else None


def _manifest(source, tokenizer, tokenizer_sha256, listed, size, stores, full) -> dict[str, Any]:
    arrays = [store[f"{name}_sha256"] for store in stores.values() for name in ("tokens", "offsets")]
    return {
        "kind": "store",
        "source": json.loads(json.dumps(asdict(source))),
        "tokenizer": {"sha256": tokenizer_sha256, "vocabulary": tokenizer.get_vocab_size()},
        "sha256": hashlib.sha256("".join(arrays).encode()).hexdigest(),
        "totals": {
            "files": sum(entry.get("files", 1) for entry in listed),
            "stopped_by": full,
            "documents": sum(store["documents"] for store in stores.values()),
            "bytes": size,
        }
        | {f"{side}_tokens": store["tokens"] for side, store in stores.items()}
        | source.left(),
        "split": source.sides(),
        "stores": stores,
        "versions": {name: version(name) for name in ("datasets", "tokenizers", "numpy") if find_spec(name)},
        "files": listed,
        "skipped": source.skipped(),
    }
