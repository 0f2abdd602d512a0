"""What ranks tell each other: whether they have one model, whether they ran one program, and a step's few numbers."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.errors import InputError, RunFailed
from paceline.mesh.mesh import Mesh
from paceline.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class Fact:
    """One micro-batch that this rank has done; `loss` is the value that was differentiated, if we saw it."""

    weight: float
    loss: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Agreed:
    """A step's numbers over all ranks: mean loss (None if some were not seen), sum of weights, micro-batches, shares."""

    loss: float | None
    weight: float
    micro_batches: int
    shared: tuple[float, ...]


class Trail:
    """A fingerprint of one kind of collective since the last step, compared between ranks before anything is updated."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.clear()

    def clear(self) -> None:
        self.units: list[str] = []
        self.digest = 0

    def add(self, unit: Unit) -> None:
        self.units.append(unit.name)
        self.digest = zlib.crc32(unit.name.encode(), self.digest)


def agree_on_step(
    mesh: Mesh,
    trails: Sequence[Trail],
    facts: Sequence[Fact],
    slots: int,
    norms: torch.Tensor,
    step: int,
    share: float,
) -> tuple[Agreed, torch.Tensor]:
    """One small gather of fingerprints, losses, weights and block norms.

    Losses and weights are summed exactly (`math.fsum`), so the order in which ranks hold them can't be seen.

    Args:
        slots: the most micro-batches that a rank may have in this step.
        norms: this rank's block norms, f64, equally many on each rank; may be empty.

    Returns:
        the step's numbers, and the norms of all ranks [world, n].
    """
    flat = [x for f in facts for x in (f.weight, math.nan if f.loss is None else float(f.loss))]
    flat += [0.0] * (2 * slots - len(flat))
    seen = sum(f.loss is not None for f in facts)
    head = [*(float(t.digest) for t in trails), share, float(len(facts)), float(seen), *flat]
    rows = mesh.all_gather_rows(torch.cat([torch.tensor(head, dtype=torch.float64, device=mesh.device), norms]))
    n = len(trails)
    if not bool((rows[:, :n] == rows[0, :n]).all()):
        _refuse_different_trails(mesh, trails, step)
    shared = tuple(rows[:, n].tolist())
    table = rows[:, n + 1 : len(head)].tolist()
    weights = [row[2 + 2 * i] for row in table for i in range(int(row[0]))]
    losses = [row[3 + 2 * i] for row in table for i in range(int(row[0]))]
    weight = math.fsum(weights)
    if weight <= 0:
        raise RunFailed(
            f"step {step} counts no token: the sum of its weights is {weight:g}, and gradients are divided by it. Leave "
            f"out batches in which every target is masked, or give them company."
        )
    complete = sum(row[1] for row in table) == len(losses)
    return Agreed(math.fsum(losses) / weight if complete else None, weight, len(weights), shared), rows[:, len(head) :]


def _refuse_different_trails(mesh: Mesh, trails: Sequence[Trail], step: int) -> None:
    for trail in trails:
        everyone = mesh.all_gather_object(trail.units)
        for rank, units in enumerate(everyone):
            for i in range(max(len(units), len(everyone[0]))):
                ours, theirs = (u[i] if i < len(u) else "nothing" for u in (everyone[0], units))
                if ours != theirs:
                    raise RunFailed(
                        f"in step {step}, {trail.verb} number {i} was of {ours!r} on rank 0 and of {theirs!r} on rank "
                        f"{rank}: their tensors were mixed up, so nothing was updated. The model takes different paths "
                        f"on different ranks: use each block at most once a forward, or equally often on all ranks."
                    )


def refuse_different_models(mesh: Mesh, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Ranks that start from different models would never agree again: say which parameter, before anything is cut."""
    if mesh.world == 1:
        return
    mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad, _checksum(p)) for name, p in parameters]
    everyone = mesh.all_gather_object(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for ours, other in zip(first, theirs, strict=False):
            if ours != other:
                what = "names, shapes, dtypes or requires_grad" if ours[:4] != other[:4] else "initial values"
                raise InputError(
                    f"ranks 0 and {rank} built different models: parameter {ours[0]!r} {list(ours[1])} on rank 0 and "
                    f"{other[0]!r} {list(other[1])} on rank {rank} differ in {what}. Build the model from the same "
                    f"config and seed on every rank."
                )
        if len(theirs) != len(first):
            raise InputError(
                f"ranks 0 and {rank} built different models: of {len(first)} and of {len(theirs)} parameters. Build the "
                f"model from the same config on every rank."
            )


def _checksum(parameter: nn.Parameter) -> int:
    data = parameter.detach().cpu().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy()) if data.numel() else 0
