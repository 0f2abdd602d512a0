"""The engine: one module, sharded by units, and one optimizer over its shards."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.core.errors import InputError, RunFailed
from paceline.core.ledger import MemoryLedger, planned_states
from paceline.mesh import collectives
from paceline.mesh.mesh import Mesh
from paceline.zero import state
from paceline.zero.agreement import Agreed, Fact, Trail, agree_on_step, refuse_different_models
from paceline.zero.buffers import Pools
from paceline.zero.hooks import Passes
from paceline.zero.optimizer import Groups, Segments
from paceline.zero.partition import partition, ties
from paceline.zero.precision import precision as precision_named
from paceline.zero.reduction import Exchanges, block_norms, tree_norm
from paceline.zero.residency import residency
from paceline.zero.schedule import Window
from paceline.zero.unit import FlatGroup, Unit

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step over all ranks.

    Attributes:
        loss: mean loss per unit of weight; None where losses did not pass through `engine.backward`.
        grad_norm: L2 norm of the whole mean gradient before clipping.
        weight: sum of the weights (counted tokens, or micro-batches).
        micro_batches: global number of micro-batches.
        shared: the number that each rank gave as `share`, in rank order.
    """

    loss: float | None
    grad_norm: float
    weight: float
    micro_batches: int
    shared: tuple[float, ...] = ()


class Engine:
    """ZeRO over one module. Made by `paceline.shard`.

    Args:
        module: the model; its parameters become views of flat buffers, the object stays the user's.
        mesh: the ranks.
        stage: row of the table in `zero/residency.py`.
        precision: "fp32" or "bf16" (compute in bf16; master, sums and moments in f32).
        remat: "none", or "full": a block keeps its inputs and is run again in backward.
        units: block names or classes; None finds the repeated blocks.
        shard: shards a replica; None means all ranks (one replica). Stage 0 has one shard.
        seed: of the random streams.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, *, stage: int, precision: str = "fp32", remat: str = "none",
        units: Sequence[str | type[nn.Module]] | None = None, shard: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if remat not in ("none", "full"):
            raise InputError(f"remat {remat!r}: choose 'none' or 'full'.")
        self.module, self.mesh, self.seed, self.step = module, mesh, seed, 0
        self.row, self.stage = residency(stage), stage
        self.precision = precision_named(precision)
        self.plane = mesh.plane((shard or mesh.world) if self.row.states_sharded else 1)
        self.ties = ties(module)
        self._pools = Pools(mesh.device)
        module.to(mesh.device)
        parts = partition(module, units)
        refuse_different_models(mesh, [entry for part in parts for entry in part.parameters])
        self.units = [Unit(part, i, self.plane, self.row, self.precision, self._pools) for i, part in enumerate(parts)]
        self.blocks, self.root = self.units[:-1], self.units[-1]
        self.groups: list[FlatGroup] = [group for unit in self.units for group in unit.trainable]
        self.segments: Segments | None = None
        self._exchanges = Exchanges()
        self._gathers, self._reductions = Trail("gather"), Trail("reduction")
        for unit in self.units:
            unit.on_gather = self._gathers.add
        self._window = Window(mesh.world)
        self._facts: list[Fact] = []
        self._explicit: tuple[float, torch.Tensor] | None = None
        self._k = 0
        self._passes = Passes(
            self.blocks, self.root, precision=self.precision, device=mesh.device, agree=self._agree,
            reduce=self._reduce, ended=self._ended, stream_key=lambda: (seed, self.step, self._leaf()),
        )  # fmt: skip
        self._passes.register(remat == "full")

    # -- the step -----------------------------------------------------------------------------------------------------

    def optimizer(
        self, factory: type[torch.optim.Optimizer], *, groups: Groups | None = None, **defaults: Any
    ) -> "Optimizer":
        """The module's optimizer: any elementwise torch class; see `Segments` for `groups`."""
        if self.segments is not None:
            raise InputError("this engine has an optimizer already: one engine has one.")
        self.segments = Segments(self.units, self.plane.shard, factory, groups, defaults)
        return Optimizer(self, self.segments)

    def window(self, total: int) -> Iterator[int]:
        """Yields this rank's share of the `total` global micro-batches of the next optimizer step.

        Each number is to be followed by one backward. Shares may differ by one; a rank that has run out joins the
        others' collectives without a batch.
        """
        if total < 1:
            raise InputError(f"{total} micro-batches in a step: there must be at least one.")
        yield from self._walk(Window.of(total, self.mesh.world, not self.row.reduce_each))

    def accumulate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields this rank's micro-batches of the next optimizer step; ranks may have different numbers of them.

        Without it each backward is reduced on its own, which is right at every stage but at stages 0 and 1 sends more.
        """
        mine = list(batches)
        counts = tuple(self.mesh.all_gather_object(len(mine)))
        if not any(counts):
            return
        for batch, _ in zip(mine, self._walk(Window.dealt(counts, not self.row.reduce_each)), strict=True):
            yield batch

    def _walk(self, window: Window) -> Iterator[int]:
        if self._k:
            raise RunFailed(f"a new window begins, but {self._k} micro-batches wait for `optim.step()`: call it first.")
        self._window = window
        mine = window.leaves(self.mesh.rank)
        for k, leaf in enumerate(mine):
            yield leaf
            if self._k != k + 1:
                raise RunFailed(
                    f"micro-batch {leaf} was followed by {self._k - k} backward passes: each must be followed by one."
                )
        while self._k < window.rounds and (not window.contiguous or not mine):
            self._passes.skip(backward=True)

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Backward of one micro-batch whose `loss` is a sum over `weight` counted tokens (0-dim).

        `optim.step` divides by the sum of all weights of the step, over all ranks and micro-batches: the one division.
        """
        self._explicit = (float(weight), loss.detach())
        loss.backward()
        if self._explicit is not None:
            self._explicit = None
            raise RunFailed(
                "the loss does not depend on the sharded module's output, so no gradient was reduced: compute it from "
                "`model(batch)`, with gradients enabled."
            )

    def idle(self) -> None:
        """Joins one forward without gradients that the other ranks make (evaluation at stage 3)."""
        self._passes.skip(backward=False)

    def _leaf(self) -> int:
        return self._window.leaf(self.mesh.rank, self._k)

    def _reduce(self, unit: Unit) -> None:
        window, rank, k = self._window, self.mesh.rank, self._k
        has_leaf = window.counts is None or k < window.counts[rank]
        reduces = not has_leaf or window.reduces(rank, k)
        for group in unit.trainable:
            assert group.sum is not None
            gradients = group.take_gradients()
            if not has_leaf:
                self._refuse_surplus(gradients)
                gradients = None
            if window.contiguous and gradients is not None:
                group.sum.local(self._leaf(), gradients)
            if reduces:
                self._exchanges.start(group.sum.exchange(window, 0 if window.contiguous else k, gradients))
        if reduces and unit.trainable:
            self._reductions.add(unit)

    def _refuse_surplus(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if any(gradient is not None for gradient in gradients):
            raise RunFailed(
                f"step {self.step} has one backward more than the {self._k} micro-batches that `engine.window` or "
                f"`engine.accumulate` gave this rank: call `optim.step()` before it, or ask for more micro-batches."
            )

    def _ended(self) -> None:
        window, rank = self._window, self.mesh.rank
        if window.counts is None or self._k < window.counts[rank]:
            weight, loss = self._explicit or (1.0, None)
            self._facts.append(Fact(weight, loss))
        self._explicit = None
        self._k += 1

    def apply(self, max_norm: float | None, share: float) -> StepReport:
        """One optimizer step from the micro-batches since the last; `Optimizer.step` calls it."""
        if self.segments is None or not self._k:
            raise RunFailed("optim.step() without a backward before it: there is no gradient to apply.")
        sums = {id(group): group.sum for group in self.groups if group.sum is not None}
        self._exchanges.drain()
        for each in sums.values():  # of a step whose last micro-batch nobody announced
            self._exchanges.start(each.complete())
        self._exchanges.drain()
        totals = {key: each.take() for key, each in sums.items()}
        norms = [block_norms(totals[id(group)]) for group in self.groups]
        agreed, norm = self._agree_on_step(norms, share)
        if not math.isfinite(norm):
            raise RunFailed(self._not_finite(norm, agreed.loss, totals))
        scale = 1.0 / agreed.weight
        if max_norm is not None:
            scale *= min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        if scale != 1.0:
            for total in totals.values():
                total.mul_(scale)
        self.settle_all()  # a unit that this step did not use may still be sending its values
        self.segments.step(totals)
        for key, each in sums.items():
            each.give_back(totals[key])
        del totals, norms
        self._pools.trim()
        self.step += 1
        self._k, self._facts, self._window = 0, [], Window(self.mesh.world)
        self._gathers.clear()
        self._reductions.clear()
        self.publish_all()
        return StepReport(agreed.loss, norm, agreed.weight, agreed.micro_batches, agreed.shared)

    def _agree_on_step(self, norms: list[torch.Tensor], share: float) -> tuple[Agreed, float]:
        """The step's numbers over all ranks, and the norm of the mean gradient."""
        slots = self._k if self._window.counts is None else max(self._window.counts)
        own = torch.cat([*(n.double() for n in norms), torch.zeros(0, dtype=torch.float64, device=self.mesh.device)])
        sent = own if self.plane.shards > 1 else own[:0]
        trails = (self._gathers, self._reductions)
        agreed, rows = agree_on_step(self.mesh, trails, self._facts, slots, sent, self.step, share)
        rows = rows[: self.plane.shards] if self.plane.shards > 1 else own.unsqueeze(0)
        columns = rows.split([n.numel() for n in norms], dim=1) if norms else ()
        whole = [c.reshape(-1)[: g.layout.blocks] for c, g in zip(columns, self.groups, strict=True)]
        return agreed, tree_norm(torch.cat(whole)) / agreed.weight if whole else 0.0

    def _not_finite(self, norm: float, loss: float | None, totals: dict[int, torch.Tensor]) -> str:
        bad = [
            part.slot.name
            for group in self.groups
            for part in group.layout.intervals(self.plane.shard)
            if not totals[id(group)][part.at : part.at + part.stop - part.start].isfinite().all()
        ]
        found = self.mesh.all_gather_object(bad[:3])
        where = "; ".join(f"rank {rank} owns {', '.join(names)}" for rank, names in enumerate(found) if names)
        return (
            f"the gradient norm of step {self.step} is {norm} and the loss is {loss}; the first parameters with a "
            f"gradient that is not finite: {where}. Nothing was updated and the last checkpoint is untouched: lower the "
            f"learning rate, look at this step's data, or train in fp32."
        )

    def publish_all(self, *, frozen: bool = False) -> None:
        """Brings the shards' values to the parameters of every rank (waited for when a unit is next used)."""
        for unit in (self.root, *self._passes.order):
            unit.publish(frozen=frozen)

    def settle_all(self) -> None:
        """Waits for values on their way: what is written into a shard before that would be lost."""
        for unit in self.units:
            unit.settle()

    def _agree(self, observed: list[int]) -> list[int]:
        """One order for all ranks: what rank 0 saw, then what others saw, then the rest."""
        seen = [index for order in self.mesh.all_gather_object(observed) for index in order]
        return list(dict.fromkeys([*seen, *range(len(self.blocks))]))

    # -- looking inside -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every parameter can be read on every rank, in its compute dtype. Collective; reads only."""
        for unit in self.units:
            unit.gather()
        for unit in self.units:
            unit.ready()
        try:
            yield
        finally:
            for unit in self.units:
                unit.release()

    def full(self, name: str) -> torch.Tensor:
        """The whole value of a parameter (by any of its names) from the master copy, a new tensor. Collective."""
        name = self.ties.get(name, name)
        for unit in self.units:
            for group in unit.groups:
                if name in group.names:
                    slot = group.layout.slots[group.names.index(name)]
                    whole = torch.empty(group.layout.padded, dtype=group.source.dtype, device=self.mesh.device)
                    collectives.all_gather(whole, group.source.contiguous(), self.plane.gather).wait()
                    return whole[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()
        raise InputError(f"no parameter is named {name!r}.")

    def persistent_buffers(self) -> list[tuple[str, torch.Tensor]]:
        kept = self.module.state_dict.__self__  # type: ignore[attr-defined]
        transient = {f"{p}.{n}".lstrip(".") for p, m in kept.named_modules() for n in m._non_persistent_buffers_set}
        return [(name, buffer) for name, buffer in kept.named_buffers() if name not in transient]

    def pieces(self, owned: bool = True) -> list[state.Piece]:
        return state.pieces(self, owned=owned)

    def scalars(self) -> dict[str, Any]:
        return state.scalars(self)

    def load(self, scalars: dict[str, Any], fetch: state.Fetch) -> None:
        state.load(self, scalars, fetch)

    def memory(self) -> MemoryLedger:
        """What this rank holds, measured from the tensors themselves, in bytes by category; buffers at their most."""
        groups = [group for unit in self.units for group in unit.groups]
        resident = sum(g.source.nbytes for g in groups if not g.trainable and not g.aliased)
        flats = sum(g.flat.untyped_storage().nbytes() for g in groups)
        return MemoryLedger({
            "parameters": flats + resident,
            "gradients": self._pools.bytes("gradients"),
            "master": sum(g.source.nbytes for g in groups if g.trainable and not g.aliased),
            "moments": self.segments.state_bytes if self.segments is not None else 0,
            "buffers": sum(b.nbytes for b in self.module.buffers()),
            "exchange": self._pools.bytes("send") + self._pools.bytes("receive"),
        })  # fmt: skip

    def planned_memory(self, moments: int, micro_batches: int) -> MemoryLedger:
        """The same by arithmetic, for an optimizer with `moments` states and `micro_batches` a step over all ranks."""
        window = Window.of(micro_batches, self.mesh.world, not self.row.reduce_each)
        owner = [[window.span(r, k) for r in range(self.mesh.world)] for k in range(window.rounds)]
        local = [[(leaf, leaf + 1)] for leaf in window.leaves(self.mesh.rank)] if window.contiguous else []
        sizes = Counter((g.layout.pattern, g.size) for unit in self.units for g in unit.groups)
        return planned_states(
            [replace(size, count=count) for (_, size), count in sizes.items()],
            shards=self.plane.shards, replicas=self.plane.replicas, parameters_sharded=self.row.parameters_sharded, moments=moments,
            owner_rounds=owner, local_rounds=local,
        )  # fmt: skip

    def describe(self) -> str:
        """Stage, ranks, dtypes and counts, for people."""
        count = {True: 0, False: 0}
        for unit in self.units:
            for group in unit.groups:
                count[group.trainable] += sum(slot.numel for slot in group.layout.slots)
        compute = sorted({str(g.flat.dtype).removeprefix("torch.") for u in self.units for g in u.groups})
        wide = sorted({str(g.source.dtype).removeprefix("torch.") for g in self.groups})
        return (
            f"ZeRO stage {self.stage}, {self.plane.replicas} replica(s) x {self.plane.shards} shard(s), "
            f"{len(self.blocks)} blocks + root; parameters {count[True]:,} trainable, {count[False]:,} frozen, "
            f"{sum(b.numel() for b in self.module.buffers()):,} in buffers; parameter and gradient dtype "
            f"{'/'.join(compute)}, sums, master and moments {'/'.join(wide) or 'none'}"
        )


class Optimizer:
    """What `engine.optimizer` returns: `param_groups` as in torch, and `step`."""

    def __init__(self, engine: Engine, segments: Segments) -> None:
        self.engine, self._segments = engine, segments

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._segments.param_groups

    @property
    def torch(self) -> torch.optim.Optimizer | None:
        """The torch optimizer over the flat shards, for learning-rate schedulers. Its states are this rank's only."""
        return self._segments.torch

    def step(self, max_norm: float | None = None, *, share: float = 0.0) -> StepReport:
        """Divides by the step's weight, clips the global norm to `max_norm`, updates, publishes. Collective.

        `share` is a number of the caller's that travels with the step's own and comes back for all ranks.
        """
        return self.engine.apply(max_norm, share)
