"""Suites of measurements by name, as the field makes them, of any causal language model of transformers.

`suite.py` says what a suite is, one small file a kind has its tasks and `run.py` measures them. What a suite needs of a model comes in
as a Subject.
"""

from needlework.layers.config import nearest

from .babilong import BABILONG
from .induction import INDUCTION
from .infinitebench import INFINITEBENCH
from .longbench import LONGBENCH
from .mniah import MNIAH
from .perplexity import PERPLEXITY
from .recall import RECALL
from .ruler import RULER
from .suite import Suite as Suite
from .zeroshot import CARVE, CCQ, LUCID, QDELTA

SUITES = {
    suite.name: suite
    for suite in (
        CCQ, CARVE, LUCID, QDELTA, RULER, MNIAH, INDUCTION, PERPLEXITY, RECALL, LONGBENCH, BABILONG, INFINITEBENCH,
    )
}  # fmt: skip


def find(name: str) -> Suite:
    """The suite of that name; ValueError names the known ones."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}{nearest(name, list(SUITES))}; known: {', '.join(SUITES)}")
    return SUITES[name]
