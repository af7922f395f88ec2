"""The retrieval tasks by name, as the command line and results.json have them."""

from collections.abc import Callable
from functools import partial

from needlework.data import (
    MULTI_KEY,
    NUMBER,
    PASSKEY,
    UUID,
    Corpus,
    Episodes,
    Ruler,
    induction_needle,
    many_needles,
    single_needle,
)


def _ruler(task: Ruler) -> Callable[..., Episodes]:
    return lambda corpus, seed, rows, T: task.episodes(corpus, seed, rows, T).episodes


def _induction(corpus: Corpus, seed: int, rows: int, T: int) -> Episodes:
    around = induction_needle(corpus, seed, 1, 1).input_ids.shape[1] - 1  # the two cues and values of this seed
    return induction_needle(corpus, seed, rows, T - around)


# name -> (corpus, seed, rows, T) -> episodes of T tokens
TASKS: dict[str, Callable[[Corpus, int, int, int], Episodes]] = {
    "needle": single_needle,
    "needles": partial(many_needles, n=4),
    **{f"needles-{n}": partial(many_needles, n=n) for n in (2, 8)},
    "passkey": _ruler(PASSKEY),
    "number": _ruler(NUMBER),
    "uuid": _ruler(UUID),
    "multikey": _ruler(MULTI_KEY),
    "induction": _induction,
}
