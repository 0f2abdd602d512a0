"""The learning rate as a pure function of the optimizer step: nothing to store, so a resumed run has the same one exactly."""

import math
from dataclasses import dataclass

from paceline.core.errors import InputError

SHAPES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm-up, then a shape.

    Attributes:
        shape: cosine, linear, constant or wsd (warm up, stay, decay).
        steps: optimizer steps of the whole run.
        warmup: steps of the linear rise; step 0 has 1/warmup, step `warmup` - 1 the peak.
        decay: last steps, falling linearly (wsd only).
        final: share of the peak that is reached at step `steps`.
    """

    shape: str
    steps: int
    warmup: int = 0
    decay: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InputError(f"schedule shape {self.shape!r}: choose one of {', '.join(SHAPES)}.")

    def factor(self, step: int) -> float:
        """Share of the peak learning rate in optimizer step `step` (counted from 0)."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        start = self.steps - self.decay if self.shape == "wsd" else self.warmup
        if step < start:
            return 1.0
        done = min(1.0, (step - start) / max(1, self.steps - start))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.shape == "cosine" else 1.0 - done
        return self.final + (1.0 - self.final) * left
