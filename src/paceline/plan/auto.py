"""From a recipe and a world to a plan: simple rules, each with its reason. No torch.

1. precision: bf16 where the processor is quick at it.
2. global batch: what the recipe says, in whole sequences.
3. stage: the lowest that fits with the smallest micro-batch, since each stage up trades traffic for memory; remat only if
   no stage fits without.
4. micro-batch: the largest that fits, keeps all ranks equally busy and stays below a size where larger is no faster.
The micro-batch, the global batch and the precision are part of a run's identity: a resumed run keeps them.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import DoesNotFit, InputError
from paceline.plan.batch import GlobalBatch, fixed_micro_batch, global_batch, settle_accumulation
from paceline.plan.census import Census, activation_bytes, recipe_census
from paceline.plan.settled import Plan, Setting
from paceline.plan.states import MOMENTS, model_states
from paceline.recipe import DecoderModel, Recipe

__all__ = ["resolve"]

_ENOUGH_TOKENS = 4096
"""Tokens of a micro-batch beyond which matrix products gain nothing on a CPU and caches lose."""
_BASE_BYTES = 500 * 1024**2
"""What a rank holds before any model: the interpreter, torch, thread stacks."""
_KEPT = "kept from the run that is resumed: it is part of the run's identity"
_SLACK = 1.1
"""Allocators and work buffers of kernels: a tenth."""


def resolve(
    recipe: Recipe,
    *,
    world: int,
    memory_bytes: int,
    bf16_fast: bool,
    parameters: int | None = None,
    world_source: str = "as asked",
    bf16_reason: str = "",
    kept: Plan | None = None,
) -> Plan:
    """Resolve every `auto` of a recipe.

    Args:
        world: ranks, all data-parallel.
        memory_bytes: what one rank may use, in bytes.
        bf16_fast: whether the device computes quickly in bf16.
        parameters: trainable elements of the built model; None: by formula for a decoder, else unknown.
        world_source: how the world was found, for reasons and errors.
        bf16_reason: what `bf16_fast` was read from.
        kept: the plan of the run that is resumed: its micro-batch, global batch and precision stay.

    Returns:
        the plan. Stage and remat are left out of it if the size of the model is unknown.

    Raises:
        InputError: the batch does not add up, `replicate` does not divide the world, or the recipe contradicts `kept`.
        DoesNotFit: no stage fits the memory.
    """
    _refuse_uneven_groups(recipe, world, world_source)
    if kept is not None:
        _refuse_contradictions(recipe, kept, world, world_source)
        batch = GlobalBatch(kept.global_sequences, _KEPT)
        micro: Setting | None = Setting(kept.micro_batch, _KEPT)
    else:
        batch = global_batch(recipe, world, world_source)
        micro = fixed_micro_batch(recipe, batch, world, world_source)
    precision = _precision(recipe, bf16_fast, bf16_reason, kept)
    known = recipe_census(recipe)
    if parameters is not None:
        known = Census(parameters, min(parameters, known.largest_unit if known else parameters))
    sizes = _Sizes(recipe, known, world // recipe.parallel.replicate, str(precision.value), memory_bytes)
    stage, remat = sizes.settle(micro)
    if micro is None:
        micro = sizes.micro_batch(batch, world, stage, remat)
    settings = {
        "precision": precision,
        "optim.global_batch": Setting(f"{batch.sequences}seq", batch.reason),
        "parallel.micro_batch": micro,
        "parallel.accumulation": settle_accumulation(recipe, batch, int(micro.value), world),
        "parallel.replicate": Setting(recipe.parallel.replicate, _given(recipe, "parallel.replicate")),
    }
    memory: dict[str, int] = {}
    if stage is not None and remat is not None:
        settings |= {"parallel.stage": stage, "parallel.remat": remat}
        memory = sizes.table(int(stage.value), str(remat.value), int(micro.value))
    return Plan(world=world, world_source=world_source, settings=settings, memory=memory, memory_available=memory_bytes)


def _refuse_uneven_groups(recipe: Recipe, world: int, world_source: str) -> None:
    replicate = recipe.parallel.replicate
    if world % replicate:
        raise InputError(
            f"{recipe.origin('parallel.replicate')}: parallel.replicate: {replicate} does not divide the world of {world} "
            f"({world_source}): choose a divisor."
        )


def _given(recipe: Recipe, key: str) -> str:
    origin = recipe.origin(key)
    return "default" if origin == "default" else f"given ({origin})"


def _precision(recipe: Recipe, bf16_fast: bool, bf16_reason: str, kept: Plan | None) -> Setting:
    if recipe.precision != "auto":
        return Setting(recipe.precision, _given(recipe, "precision"))
    if kept is not None:
        return Setting(kept.precision, _KEPT)
    why = f" ({bf16_reason})" if bf16_reason else ""
    if bf16_fast:
        return Setting("bf16", f"bf16 is quick here{why}; master values and sums stay fp32")
    return Setting("fp32", f"bf16 is not quick here{why}")


def _refuse_contradictions(recipe: Recipe, kept: Plan, world: int, world_source: str) -> None:
    """A resumed run keeps its identity: a recipe that says otherwise means a new run."""
    said: list[tuple[str, int | str, int | str]] = []
    if recipe.precision != "auto":
        said.append(("precision", recipe.precision, kept.precision))
    if recipe.parallel.micro_batch != "auto":
        said.append(("parallel.micro_batch", recipe.parallel.micro_batch, kept.micro_batch))
    if recipe.optim.global_batch != "auto":
        now = global_batch(recipe, world, world_source).sequences
        said.append(("optim.global_batch", f"{now}seq", f"{kept.global_sequences}seq"))
    for key, now, before in said:
        if now != before:
            raise InputError(
                f"{recipe.origin(key)}: {key}: {now} is asked for, but the run that is resumed has {before}, and this is part "
                "of a run's identity: put the old value back, or start a new run with another run.dir."
            )
    accumulation = recipe.parallel.accumulation
    if accumulation != "auto" and kept.micro_batch * accumulation * world != kept.global_sequences:
        raise InputError(
            f"{recipe.origin('parallel.accumulation')}: parallel.accumulation: the resumed run has {kept.global_sequences} "
            f"sequences in micro-batches of {kept.micro_batch}, which is not accumulation {accumulation} x world {world} "
            f"({world_source}) of them: leave accumulation auto."
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Byte arithmetic of one rank; knows no rule of the batch."""

    recipe: Recipe
    census: Census | None
    shard: int
    precision: str
    memory_bytes: int

    def table(self, stage: int, remat: str, micro: int) -> dict[str, int]:
        """Bytes by category; activations of a model that is not ours are unknown and count as nothing."""
        assert self.census is not None
        recipe, element = self.recipe, 2 if self.precision == "bf16" else 4
        moments = MOMENTS[recipe.optim.name] + (1 if recipe.optim.momentum else 0)
        precision: Literal["fp32", "bf16"] = "bf16" if element == 2 else "fp32"
        states = model_states(self.census.parameters, self.shard, stage, precision=precision, moments=moments)
        # Two units are whole at a time at stage 3: the one that computes and the one that is fetched ahead.
        gather = 2 * element * self.census.largest_unit if stage == 3 and self.shard > 1 else 0
        # A unit's whole gradient lives until it is reduced.
        gather += element * self.census.largest_unit if stage >= 2 and self.shard > 1 else 0
        activations = 0
        if isinstance(recipe.model, DecoderModel):
            tokens, vocab = micro * recipe.data.sequence_length, recipe.data.tokenizer.vocab_size
            activations = activation_bytes(recipe.model, vocab, tokens, element=element, remat=remat)
        used = {**states.as_dict(), "gather": gather, "activations": activations, "base": _BASE_BYTES}
        return {**used, "slack": int((sum(used.values()) - _BASE_BYTES) * (_SLACK - 1))}

    def fits(self, stage: int, remat: str, micro: int) -> bool:
        """Whether one rank's bytes are within its memory."""
        return sum(self.table(stage, remat, micro).values()) <= self.memory_bytes

    def settle(self, micro: Setting | None) -> tuple[Setting | None, Setting | None]:
        """Choose stage and remat; (None, None) if the model's size is unknown."""
        parallel = self.recipe.parallel
        if self.census is None:
            return None, None
        least = int(micro.value) if micro else 1
        remats = ["none", "full"] if parallel.remat == "auto" else [parallel.remat]
        stages = ([0] if self.shard == 1 else [0, 1, 2, 3]) if parallel.stage == "auto" else [parallel.stage]
        for remat in remats:
            for stage in stages:
                if self.fits(stage, remat, least):
                    return self._stage_setting(stage, remat, least), self._remat_setting(remat)
        raise self._does_not_fit(stages[-1], remats[-1], least)

    def micro_batch(self, batch: GlobalBatch, world: int, stage: Setting | None, remat: Setting | None) -> Setting:
        """Choose the largest micro-batch that fits, keeps ranks equally busy and is not needlessly large."""
        length = self.recipe.data.sequence_length
        enough = max(1, _ENOUGH_TOKENS // length)
        sizes = [size for size in range(1, batch.sequences + 1) if batch.sequences % size == 0 and size <= enough]
        if stage is not None and remat is not None:
            sizes = [size for size in sizes if self.fits(int(stage.value), str(remat.value), size)] or [1]
        even = [size for size in sizes if batch.sequences // size % world == 0]
        busy = [size for size in sizes if batch.sequences // size >= world]
        size = max(even or busy or [1])
        spread = (
            "keeps all ranks equally busy" if even else "gives every rank work" if busy else "is as small as can be"
        )
        fits = "fits in memory, " if stage is not None else ""
        return Setting(
            size,
            f"the largest divisor of {batch.sequences} sequences that {fits}{spread} and has at most {_ENOUGH_TOKENS} tokens "
            f"({size} x {length}); stored and kept on resume at any world size",
        )

    def _stage_setting(self, stage: int, remat: str, micro: int) -> Setting:
        if self.recipe.parallel.stage != "auto":
            return Setting(stage, _given(self.recipe, "parallel.stage"))
        if self.shard == 1:
            return Setting(0, "one rank holds everything: there is nobody to share with")
        need = sum(self.table(stage, remat, micro).values())
        lower = f"; stage {stage - 1} does not fit" if stage else ""
        return Setting(
            stage,
            f"the lowest stage that fits: {_gib(need)} of {_gib(self.memory_bytes)} a rank with micro-batch {micro}{lower}",
        )

    def _remat_setting(self, remat: str) -> Setting:
        if self.recipe.parallel.remat != "auto":
            return Setting(remat, _given(self.recipe, "parallel.remat"))
        return Setting(remat, "activations fit without" if remat == "none" else "no stage fits without recomputation")

    def _does_not_fit(self, stage: int, remat: str, micro: int) -> DoesNotFit:
        table = self.table(stage, remat, micro)
        largest = sorted(table.items(), key=lambda item: -item[1])[:3]
        items = ", ".join(f"{name} {_gib(size)}" for name, size in largest)
        return DoesNotFit(
            f"The model does not fit: each of {self.shard} ranks would need {_gib(sum(table.values()))} at stage {stage} with remat "
            f"{remat} and micro-batch {micro}, and has {_gib(self.memory_bytes)} (largest: {items}). Use more ranks on more "
            "hosts, shorter sequences, a smaller model, or leave parallel.stage, remat and micro_batch auto."
        )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
