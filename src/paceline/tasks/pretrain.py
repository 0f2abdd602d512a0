"""Next-token prediction."""

from typing import Any

import torch
from torch import nn

from paceline.core.errors import InputError
from paceline.core.targets import IGNORE
from paceline.data.loader import Batch


def loss(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """(sum of cross entropy over counted targets, their count) of a module that returns that sum, as our decoder does."""
    total = module(batch.tokens_BT, batch.targets_BT, batch.segments_BT)
    return total, float((batch.targets_BT != IGNORE).sum())


def any_loss(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    """The same for any module that is called with (tokens, targets) and returns its loss.

    A 0-dim tensor is the mean over the counted targets, and is weighted with their count; a pair is (sum, count).
    """
    out: Any = module(batch.tokens_BT, batch.targets_BT)
    if isinstance(out, tuple) and len(out) == 2:
        return out[0], float(out[1])
    if isinstance(out, torch.Tensor) and out.dim() == 0:
        count = float((batch.targets_BT != IGNORE).sum())
        return out * count, count
    raise InputError(
        f"the module returned {type(out).__name__}: a trained module returns its mean loss as a 0-dim tensor, or "
        f"(sum, count)."
    )
