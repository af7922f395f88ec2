"""Text and tokens: the byte tokenizer (id of byte b is b, end of text 256), and any `tokenizers` JSON file.

The byte tokenizer is a `tokenizers.Tokenizer` like any other, so that a checkpoint can carry it. The library takes strings alone, and
bytes that are not valid UTF-8 have none: `encode_bytes` and `decode_bytes` do the same for any bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from tokenizers import Tokenizer

EOT = "<|eot|>"
EOT_NAMES = (EOT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def byte_alphabet() -> list[str]:
    """The character that ByteLevel tokenizers (GPT-2's and its heirs) write for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in printable)
    shown = {b: b for b in printable} | {b: 256 + i for i, b in enumerate(others)}
    return [chr(shown[b]) for b in range(256)]


def byte_tokenizer() -> Tokenizer:
    """A ByteLevel tokenizer without merges: byte b has id b, "<|eot|>" has id 256; 257 ids in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={c: b for b, c in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Any `tokenizers` JSON file, or a directory with a tokenizer.json in it.

    Texts keep their length: truncation and padding that the file may ask for, as files for models of one length do, are off.
    FileNotFoundError if there is none; ValueError, with the library's reason, if the file is something else.
    """
    from tokenizers import Tokenizer

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer: no file {file}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"tokenizer: {file} is not a `tokenizers` JSON file: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_byte_tokenizer(tokenizer: Tokenizer) -> bool:
    """True if the tokenizer is `byte_tokenizer()`, so that `encode_bytes` equals it."""
    return tokenizer.to_str() == byte_tokenizer().to_str()


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids of the text [n] int64, without tokens that the tokenizer would put around it."""
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The ids of each text, [n] uint16 (uint32 for vocabularies over 65,536), on all cores.

    The name of a special token in a text ("<|eot|>" in the source of a tokenizer) is text, not that token.
    """
    dtype = token_dtype(tokenizer)
    if is_byte_tokenizer(tokenizer):
        return [encode_bytes(text.encode()) for text in texts]
    special, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, True
    try:
        return [np.array(e.ids, dtype) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = special


def token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """uint16, or uint32 for vocabularies over 65,536."""
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


def encode_bytes(data: bytes) -> np.ndarray:
    """The byte tokenizer's ids of any bytes, [n] uint16."""
    return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)


def decode_bytes(ids: ArrayLike) -> bytes:
    """The bytes of the byte tokenizer's ids; ends of text (256) are left out."""
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()


def byte_ids(tokenizer: Tokenizer) -> np.ndarray:
    """The id of each of the 256 bytes as a token of its own, [256] int64.

    ValueError if the tokenizer has no such tokens (it is not of the ByteLevel kind).
    """
    ids = [tokenizer.token_to_id(c) for c in byte_alphabet()]
    if None in ids:
        raise ValueError(
            f"tokenizer: {ids.count(None)} of the 256 bytes are no tokens of their own, the first is byte "
            f"{ids.index(None)}; compact needles need a ByteLevel tokenizer"
        )
    return np.array(ids, dtype=np.int64)


def eot_id(tokenizer: Tokenizer) -> int:
    """The id of the end-of-text token; ValueError naming the tokens that were tried if there is none."""
    for name in EOT_NAMES:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found
    raise ValueError(f"tokenizer: no end-of-text token; tried {', '.join(EOT_NAMES)}")
