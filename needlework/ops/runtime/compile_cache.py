"""Graphs that torch.compile keeps on disk, and the key by which it finds them again.

A graph holds sizes of what operators return, and some follow from launch configs; its key has the operators' names and not what
they are. So the ops' text and tables, and the verdicts of doctor, go into every key: after an upgrade, or with another config, a
graph is made anew. One of other sizes would stop with an assertion, one of equal sizes might be wrong.
"""

import hashlib
from functools import cache
from pathlib import Path

from torch.compiler import config

from needlework.ops.runtime.constant import constant
from needlework.ops.runtime.denylist import path


@constant
def keyed() -> None:
    """The key of the graph that is being made, and of those after it; what the user has there stays."""
    if _known() not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} needlework {_known()}".strip()


@cache
def _known() -> str:
    ops = Path(__file__).parents[1]
    files = sorted(file for file in ops.rglob("*") if file.suffix in (".py", ".json"))
    files += [path()] if path().is_file() else []
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
