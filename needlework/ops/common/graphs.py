"""Graphs that torch.compile keeps on disk, and the key by which it finds them again.

A graph holds sizes of what operators return, and some follow from launch plans; its key has the operators' names and not what
they are. So the ops' text and tables, and the verdicts of doctor, go into every key: after an upgrade, or with another plan, a
graph is made anew. One of other sizes would stop with an assertion, one of equal sizes might be wrong.
"""

import hashlib
from functools import cache
from pathlib import Path

from torch.compiler import config

from needlework.ops.common.constant import constant
from needlework.ops.common.struck import path


@constant
def keyed() -> None:
    """From now on in this process, beside what the user has there."""
    _keyed()


@cache
def _keyed() -> None:
    ops = Path(__file__).parents[1]
    files = sorted(file for file in ops.glob("*/*") if file.suffix in (".py", ".json"))
    files += [path()] if path().is_file() else []
    known = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    config.cache_key_tag = f"{config.cache_key_tag} needlework {known}".strip()
