"""The text of the second study: English prose and reference from Debian packages, and the Python source of
docs/results/second/packages.txt, which is installed in an environment of its own.

    needlework gather          makes the archive in FOLDER, where there are apt-get and a network; git does not keep it
    docs/results/second/corpora/       has its manifest, and that of the text before it: every package with its release, digest, licence
                                       and bytes by side

A machine without a network gets the folder, and tokenises it with the tokenizer in it. SHA256 is the archive's: runs that are to be
compared read one text.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needlework.data import Archive, Packages, StoreConfig, eot_id, train_tokenizer
from needlework.data.debian import KNOWN, unpacked
from needlework.data.gather import Split, gather, of_debian, of_python
from needlework.files import write_whole
from needlework.recipes.study.mixers import VOCABULARY

FOLDER = "runs/text/second"
SHA256 = "3618f8387d70c093b1908d63e623470a87ef1e448344bd87ae9e81acceb1eb4b"
TRAINING = 68_553_705  # unique tokens of the training side, under the tokenizer in FOLDER
EPOCHS = 1.5  # no experiment reads a token of text more often

SHARE = 0.1  # of the bytes, the most that one package may be
TABLES = ("chardet",)  # a Python package that is tables
SPLIT = Split(held_out=0.03, development=0.03, other=("bible-kjv-text", "numpy", "rich"))
EVERY = 4  # the tokenizer is trained on every fourth document of the training side


def make(folder: Path, debs: Path, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Gathers the text and trains its tokenizer; returns the manifest. Debian packages are downloaded to `debs` and unpacked there."""
    debian = of_debian(unpacked(name, debs) for name in KNOWN)
    python = of_python(Packages(held_out=1e-9), TABLES)
    manifest = gather(itertools.chain(debian, python), folder, SPLIT, SHARE, tell)
    pieces = Archive(path=str(folder)).stream()
    training = (piece.text for piece in pieces if piece.key.startswith("train:"))
    tokenizer = train_tokenizer(itertools.islice(training, 0, None, EVERY), VOCABULARY)
    eot_id(tokenizer)
    write_whole(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    tell(f"a tokenizer of {tokenizer.get_vocab_size():,} tokens")
    return manifest


def corpus(folder: str = FOLDER) -> StoreConfig:
    """What a recipe reads."""
    return StoreConfig(source=Archive(path=folder, sha256=SHA256), tokenizer=f"{folder}/tokenizer.json", vocabulary=VOCABULARY)
