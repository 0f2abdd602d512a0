"""The evaluation loss: the mean over counted tokens of the whole split, the same number at every world size."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.records import EvalRecord
from paceline.zero import Engine


def evaluate(
    engine: Engine, batches: int, batch: Callable[[int], Any], loss: Callable[[Any, Any], tuple[Any, float]]
) -> EvalRecord:
    """Batch i is taken by rank i % world. Each contributes a sum and a count, and the sums are added exactly.

    Collective: every rank makes equally many forwards, the last of them without a batch where they do not come out even.
    """
    started = time.perf_counter()
    mesh, module = engine.mesh, engine.module
    training = module.training
    module.eval()
    mine: list[tuple[float, float]] = []
    with torch.no_grad():
        for first in range(0, batches, mesh.world):
            if first + mesh.rank < batches:
                total, weight = loss(module, batch(first + mesh.rank))
                mine.append((float(total), float(weight)))
            else:
                engine.idle()
    module.train(training)
    everyone = [pair for ranks in mesh.all_gather_object(mine) for pair in ranks]
    tokens = math.fsum(weight for _, weight in everyone)
    mean = math.fsum(total for total, _ in everyone) / tokens if tokens else math.nan
    return EvalRecord(engine.step, mean, int(tokens), time.perf_counter() - started)
