"""Where every random number of this package comes from, so that a batch is a pure function of its arguments.

The rule: row `row` of step `step` of the task `name` draws from a generator of its own, seeded with
(crc32(name), seed, step, row). Nothing is carried from one step to the next, so any step can be made again, alone and
in any order; a row does not depend on how many rows its batch has; and two tasks never share a stream.
Evaluation sets are step 0.
"""

import zlib

import numpy as np


def generator(name: str, seed: int, step: int = 0, row: int = 0) -> np.random.Generator:
    """The generator of one row: seed, step and row are integers >= 0."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed, step, row])
