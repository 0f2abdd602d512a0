"""Bytes of the model's states on one rank, by ZeRO stage (case I85; the ZeRO paper, arXiv 1910.02054, figure 1).

For P parameters on N ranks, bf16 and Adam: stage 0 16P; 1 4P + 12P/N; 2 2P + 14P/N; 3 16P/N. Gradients kept in f32 add 2
bytes wherever gradients sit. In fp32 the weights are their own master copy.
"""

from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["MOMENTS", "States", "model_states"]

MOMENTS = {
    "adamw": 2,
    "adam": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "sgd": 0,
}
"""f32 tensors of optimizer state for each parameter; sgd and rmsprop keep one more with momentum."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank that stay for the whole run."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """The sum of all four."""
        return self.weights + self.gradients + self.master + self.moments

    def as_dict(self) -> dict[str, int]:
        """Return the bytes by category."""
        return asdict(self)


def model_states(
    parameters: int,
    world: int,
    stage: int,
    *,
    precision: Literal["fp32", "bf16"],
    moments: int = 2,
    gradient_bytes: Literal[2, 4] = 4,
) -> States:
    """Return the bytes of weights, gradients, master copy and optimizer state on one rank.

    Args:
        parameters: trainable elements of the whole model.
        world: ranks that share the shards.
        stage: 0 shards nothing, 1 the optimizer state and master, 2 gradients too, 3 weights too.
        precision: compute dtype; bf16 adds an f32 master copy.
        moments: f32 tensors of optimizer state for each parameter (AdamW 2, SGD 0).
        gradient_bytes: 4 for gradients kept in f32 (what the engine does), 2 for bf16.
    """
    whole, part = parameters, -(-parameters // world)
    return States(
        weights=(2 if precision == "bf16" else 4) * (part if stage >= 3 else whole),
        gradients=(4 if precision == "fp32" else gradient_bytes) * (part if stage >= 2 else whole),
        master=4 * (part if stage >= 1 else whole) if precision == "bf16" else 0,
        moments=4 * moments * (part if stage >= 1 else whole),
    )
