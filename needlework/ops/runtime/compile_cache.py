"""The key of graphs that torch.compile keeps on disk.

A graph holds the sizes of operators' results, and some sizes follow from launch configs; torch's key has the operators' names only.
So the ops' text and tables and doctor's denylist go into every key: after an upgrade, or with another launch config, the graph is
compiled anew. An old graph would fail an assertion on sizes, or compute with wrong ones.
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
