"""Which row is where in the endless stream of rows: a pure function of (seed, position)."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` rows in an epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def rows_at(seed: int, start: int, stop: int, count: int) -> np.ndarray:
    """Row numbers at positions `[start, stop)` of the stream, which may run over the end of an epoch."""
    positions = np.arange(start, stop)
    return np.asarray([permutation(seed, int(p // count), count)[p % count] for p in positions], dtype=np.int64)
