"""The order of a text's windows in each epoch: a permutation that is computed from the index, without a list or a state.

    window = walk(index, epoch),   walk: a permutation of 0 … n - 1, keyed by (seed, epoch)

A balanced Feistel network permutes the 4^h >= n numbers of 2h bits; a number outside 0 … n - 1 is permuted again until it is
inside, which leaves a permutation of 0 … n - 1 and takes fewer than four steps on average. A batch asks for B numbers and gets them in
microseconds, whatever n is; a drawn permutation would be n numbers to make, keep and make again at every resume and epoch.
"""

import zlib

import numpy as np

ROUNDS = 6


def shuffled(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The places [m] int64 of `index` [m], each in 0 … n - 1, under the permutation of (n, seed, epoch)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence([zlib.crc32(b"order"), seed, epoch]).generate_state(ROUNDS, np.uint64)
    place = _feistel(np.asarray(index).astype(np.uint64), half, keys)
    while (outside := place >= n).any():
        place[outside] = _feistel(place[outside], half, keys)
    return place.astype(np.int64)


def epoch_windows(step: int, B: int, rows: range, n: int, seed: int) -> np.ndarray:
    """The windows, of n, at `rows` of the batch of `step`: [len(rows)] int64.

    Steps of B rows walk through epoch after epoch; a batch may hold the end of one and the start of the next.
    """
    epochs, index = np.divmod(step * B + np.arange(rows.start, rows.stop), n)
    windows = np.empty_like(index)
    for epoch in np.unique(epochs):
        windows[epochs == epoch] = shuffled(index[epochs == epoch], n, seed, int(epoch))
    return windows


def rank_rows(B: int, rank: int, world: int) -> range:
    """The rows of a batch of B that `rank` of `world` ranks takes; together the ranks take each row once.

    ValueError if there are fewer rows than ranks, or rank is not in 0 … world - 1.
    """
    if not 0 <= rank < world:
        raise ValueError(f"order: rank is 0 to {world - 1} of {world} ranks, got {rank}")
    if B < world:
        raise ValueError(f"order: a batch of {B} rows is too small for {world} ranks")
    return range(rank * B // world, (rank + 1) * B // world)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of x reaches every bit of the result; products wrap."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
