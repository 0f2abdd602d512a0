"""The batch identity (case I84): global = micro-batch x accumulation x data-parallel world; two of the three give the third."""

from dataclasses import dataclass

from paceline.core.errors import InputError
from paceline.core.quantity import Kind, Quantity
from paceline.plan.settled import Setting
from paceline.recipe import Recipe

__all__ = ["GlobalBatch", "fixed_micro_batch", "global_batch", "settle_accumulation"]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Sequences of one optimizer step over all ranks, and why."""

    sequences: int
    reason: str


def global_batch(recipe: Recipe, world: int, world_source: str) -> GlobalBatch:
    """Return the sequences of one optimizer step.

    Tokens are cut into whole sequences, rounded down. `auto` multiplies micro-batch, accumulation and world.

    Raises:
        InputError: the global batch holds less than one sequence.
    """
    given, length = recipe.optim.global_batch, recipe.data.sequence_length
    if given == "auto":
        micro, accumulation = recipe.parallel.micro_batch, recipe.parallel.accumulation
        assert isinstance(micro, int) and isinstance(accumulation, int), "the recipe checks that both are given"
        return GlobalBatch(
            micro * accumulation * world,
            f"micro_batch {micro} x accumulation {accumulation} x world {world} ({world_source})",
        )
    assert isinstance(given, Quantity)
    where = recipe.origin("optim.global_batch")
    if given.kind is Kind.SEQUENCES:
        return GlobalBatch(given.whole, f"given ({where})")
    tokens = given.whole
    if tokens < length:
        raise InputError(
            f"{where}: optim.global_batch: {given} is less than one sequence of {length} tokens (data.sequence_length): "
            "raise the global batch or shorten the sequences."
        )
    sequences = tokens // length
    rounded = f", rounded down to {sequences * length} tokens" if tokens % length else ""
    return GlobalBatch(sequences, f"{given} / {length} tokens a sequence{rounded} ({where})")


def fixed_micro_batch(recipe: Recipe, batch: GlobalBatch, world: int, world_source: str) -> Setting | None:
    """Return the micro-batch that the recipe fixes, directly or through accumulation; None if it is free.

    Raises:
        InputError: the identity does not hold, or the micro-batch does not divide the global batch.
    """
    micro, accumulation = recipe.parallel.micro_batch, recipe.parallel.accumulation
    total = batch.sequences
    if micro != "auto" and accumulation != "auto":
        if micro * accumulation * world != total:
            fitting = micro * accumulation * world
            raise InputError(
                f"{recipe.origin('parallel.accumulation')}: the batch does not add up: {total} sequences (optim.global_batch: "
                f"{batch.reason}) are not micro_batch {micro} x accumulation {accumulation} x world {world} ({world_source}) "
                f"= {fitting}: leave parallel.accumulation or parallel.micro_batch auto, or write global_batch: {fitting}seq."
            )
        return Setting(micro, f"given ({recipe.origin('parallel.micro_batch')})")
    if micro != "auto":
        if total % micro:
            raise InputError(
                f"{recipe.origin('parallel.micro_batch')}: parallel.micro_batch: {micro} does not divide the {total} sequences "
                f"of the global batch ({batch.reason}): choose one of {_some_divisors(total)}, or leave it auto."
            )
        return Setting(micro, f"given ({recipe.origin('parallel.micro_batch')})")
    if accumulation != "auto":
        if total % (accumulation * world):
            raise InputError(
                f"{recipe.origin('parallel.accumulation')}: parallel.accumulation: the {total} sequences of the global batch "
                f"({batch.reason}) cannot be cut into accumulation {accumulation} x world {world} ({world_source}) equal "
                f"micro-batches: change one of them, or leave accumulation auto."
            )
        found = total // (accumulation * world)
        return Setting(found, f"{total} sequences / (accumulation {accumulation} x world {world} ({world_source}))")
    return None


def settle_accumulation(recipe: Recipe, batch: GlobalBatch, micro: int, world: int) -> Setting:
    """Return the micro-batches of the busiest rank; the global number of them need not divide by the world."""
    given = recipe.parallel.accumulation
    if given != "auto":
        return Setting(given, f"given ({recipe.origin('parallel.accumulation')})")
    micro_batches = batch.sequences // micro
    most, uneven = -(-micro_batches // world), micro_batches % world
    reason = f"{batch.sequences} sequences / (micro_batch {micro} x world {world})"
    if micro_batches < world:
        reason += (
            f": {micro_batches} micro-batches, so {world - micro_batches} of {world} ranks have nothing to compute"
        )
    elif uneven:
        reason += f": {micro_batches} micro-batches, so {uneven} of {world} ranks take one more than the others"
    return Setting(most, reason)


def _some_divisors(total: int) -> str:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    return ", ".join(str(number) for number in divisors[:8])
