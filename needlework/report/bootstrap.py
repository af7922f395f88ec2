"""The 95 % interval of a suite's number, or of a mean of several, by drawing its documents again, with replacement.

What is held is another draw of documents from where these came; another seed of training, or another prompt, is not in it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from needlework.eval.retrieval import interval as wilson
from needlework.eval.suites.number import Number

if TYPE_CHECKING:
    from numpy import ndarray

DRAWS, SEED = 1000, 0


def interval(number: Number) -> tuple[float, float] | None:
    """(low, high); None where another draw is the same. Wilson's where all are right or all wrong, of which every draw is the same."""
    documents = number["documents"]
    if not number.get("exp") and set(documents) in ({0.0}, {1.0}):
        return wilson(documents[0], len(documents))
    return _percentiles(draws(number))


def interval_of_mean(numbers: Sequence[Number]) -> tuple[float, float] | None:
    """That of the plain mean of several, whose documents are drawn apart; None where another draw is the same."""
    import numpy as np

    return _percentiles(np.mean([draws(number, SEED + i) for i, number in enumerate(numbers)], axis=0))


def draws(number: Number, seed: int = SEED) -> "ndarray":
    """The number's value in each of DRAWS draws of its documents, [DRAWS] float64."""
    import numpy as np

    a = np.array(number["documents"], dtype=np.float64)
    w = np.array(number.get("weights", np.ones_like(a)), dtype=np.float64)
    generator = np.random.default_rng(seed)
    found = np.empty(DRAWS)
    for i in range(DRAWS):  # one draw at a time: ten thousand documents times a thousand draws are 80 MB
        chosen = generator.integers(len(a), size=len(a))
        found[i] = a[chosen].sum() / w[chosen].sum()
    return np.exp(found) if number.get("exp") else found


def _percentiles(found: "ndarray") -> tuple[float, float] | None:
    import numpy as np

    low, high = np.percentile(found, (2.5, 97.5))
    return (float(low), float(high)) if low < high else None
