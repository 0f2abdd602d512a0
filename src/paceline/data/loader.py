"""Micro-batches by number: `batch(step, leaf)` is a pure function, so ranks, resumes and world sizes can't be seen in it."""

from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.errors import InputError
from paceline.data.order import rows_at
from paceline.data.packing import Rows
from paceline.data.tokens import Corpus


@dataclass(frozen=True, slots=True)
class Batch:
    """int64 tensors [sequences, length]; targets are IGNORE where nothing counts."""

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    segments_BT: torch.Tensor


class Loader:
    """Cuts a corpus into optimizer steps of `global_sequences` rows and micro-batches of `micro_batch` rows.

    Args:
        steps: optimizer steps; or `epochs`: passes over the training rows, the last step being what is left.
    """

    def __init__(
        self, corpus: Corpus, *, sequence_length: int, micro_batch: int, global_sequences: int, seed: int,
        packing: bool = True, steps: int | None = None, epochs: int | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._rows = Rows.of(corpus.train, sequence_length, packing)
        self._eval = Rows.of(corpus.eval, sequence_length, packing) if corpus.eval is not None else None
        if len(self._rows) < 1:
            raise InputError("the training text has fewer than two tokens: give more text in data.train.")
        self._micro, self._global, self._seed = micro_batch, global_sequences, seed
        self._device = device or torch.device("cpu")
        self._total = steps * global_sequences if steps is not None else (epochs or 1) * len(self._rows)
        self.steps = -(-self._total // global_sequences)

    @property
    def epoch_rows(self) -> int:
        return len(self._rows)

    def _span(self, step: int) -> tuple[int, int]:
        return step * self._global, min((step + 1) * self._global, self._total)

    def micro_batches(self, step: int) -> int:
        """Global number of micro-batches of an optimizer step."""
        start, stop = self._span(step)
        return -(-(stop - start) // self._micro)

    def batch(self, step: int, leaf: int) -> Batch:
        """Micro-batch number `leaf` of an optimizer step."""
        start, stop = self._span(step)
        first = start + leaf * self._micro
        rows = rows_at(self._seed, first, min(first + self._micro, stop), len(self._rows))
        return self._batch(self._rows, rows)

    def eval_batches(self) -> int:
        return 0 if self._eval is None else -(-len(self._eval) // self._micro)

    def eval_batch(self, index: int) -> Batch:
        """Rows of the evaluation split in order; every token is in exactly one batch."""
        assert self._eval is not None
        first = index * self._micro
        return self._batch(self._eval, np.arange(first, min(first + self._micro, len(self._eval))))

    def _batch(self, rows: Rows, indices: np.ndarray) -> Batch:
        return Batch(*(torch.from_numpy(array).to(self._device) for array in rows.take(indices)))
