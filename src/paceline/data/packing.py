"""From a stream of documents to rows of fixed length."""

from dataclasses import dataclass

import numpy as np

from paceline.core.errors import InputError
from paceline.core.targets import IGNORE
from paceline.data.tokens import Split


@dataclass(frozen=True)
class Rows:
    """Rows over a split: row i holds tokens `[starts[i], stops[i])`, at most `length` of them, and predicts the next ones.

    With packing a row runs on over document ends, so no token is wasted; a token never predicts one of another document,
    and segments say which tokens may see each other. Without it a row holds (a part of) one document.
    """

    split: Split
    length: int
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, split: Split, length: int, packing: bool) -> "Rows":
        total = len(split.tokens)
        if packing:
            starts = np.arange(0, total - 1, length, dtype=np.int64)
            return cls(split, length, starts, np.minimum(starts + length, total - 1))
        ends = np.append(split.starts[1:], total)
        pieces = [
            (start, min(start + length, end - 1))
            for first, end in zip(split.starts.tolist(), ends.tolist(), strict=True)
            for start in range(first, end - 1, length)
        ]
        if not pieces:
            raise InputError("no document has two tokens: there is nothing to predict. Give longer documents.")
        table = np.asarray(pieces, dtype=np.int64)
        return cls(split, length, table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, targets, segments) of some rows, each [n, length], int64. Padding has target IGNORE and segment -1."""
        shape = (len(indices), self.length)
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        segments = np.full(shape, -1, dtype=np.int64)
        for row, index in enumerate(indices):
            start, stop = int(self.starts[index]), int(self.stops[index])
            n = stop - start
            text = self.split.tokens[start : stop + 1].astype(np.int64)
            owner = np.searchsorted(self.split.starts, np.arange(start, stop + 1), side="right")
            tokens[row, :n], segments[row, :n] = text[:-1], owner[:-1]
            targets[row, :n] = np.where(owner[1:] == owner[:-1], text[1:], IGNORE)
        return tokens, targets, segments
