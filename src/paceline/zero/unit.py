"""A unit: the flat buffers of one block, and the verbs that move them.

Note [Storage]
--------------
Parameters are views of their group's flat buffer for the whole run. Stage 3 releases a unit by emptying the buffer's
storage and gathers it into the same storage object: autograd saved views of it (a linear layer saves `weight.t()`), and
those must see the gathered values again in backward.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.core.layout import FlatLayout
from paceline.core.ledger import GroupSize
from paceline.mesh import collectives
from paceline.mesh.collectives import Pending
from paceline.mesh.mesh import Plane
from paceline.zero import guard
from paceline.zero.buffers import Pools, views
from paceline.zero.partition import Part
from paceline.zero.precision import Precision
from paceline.zero.reduction import GradientSum
from paceline.zero.residency import Residency


class FlatGroup:
    """The parameters of a unit that share a dtype and a trainability, in one flat buffer of the compute dtype.

    Attributes:
        flat: [padded] in the compute dtype; the parameters are views of it.
        source: [shard] what a gather casts this rank's slice from: the master, or a frozen group's resident shard.
        master: [shard] f32 or wider, what the optimizer updates; a slice of `flat` itself where that is as wide and rests.
    """

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], plane: Plane, row: Residency, precision: Precision, pools: Pools
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        self.trainable = first.requires_grad
        self.layout = FlatLayout.of(((n, tuple(p.shape)) for n, p in named), plane.shards, plane.replicas)
        compute, wide = precision.of(first.dtype), precision.master(first.dtype) if self.trainable else first.dtype
        self.flat = torch.zeros(self.layout.padded, dtype=compute, device=plane.mesh.device)
        low = plane.shard * self.layout.shard_numel
        self._own = (low, low + self.layout.shard_numel)
        rests = not row.parameters_sharded
        aliased = rests and (wide == compute or not self.trainable)
        shard = None if aliased else torch.zeros(self.layout.shard_numel, dtype=wide, device=plane.mesh.device)
        if shard is not None:
            for part in self.layout.intervals(plane.shard):
                value = self.parameters[self.names.index(part.slot.name)].detach().reshape(-1)[part.start : part.stop]
                shard[part.at : part.at + value.numel()].copy_(value)
        for parameter, view in zip(self.parameters, views(self.flat, self.layout), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.source = self.own if shard is None else shard
        self.master = self.source if self.trainable else None
        self.sum = GradientSum(self.layout, plane, pools, leaf_dtype=compute, dtype=wide) if self.trainable else None
        self.aliased = aliased
        self._nbytes = self.flat.untyped_storage().nbytes()

    @property
    def own(self) -> torch.Tensor:
        """This rank's slice of the flat buffer."""
        return self.flat[self._own[0] : self._own[1]]

    def fill(self, group: collectives.Group | None) -> Pending:
        """Starts bringing every rank's slice into the flat buffer, cast from `source`."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._nbytes)
        own = self.own
        if not self.aliased:
            own.copy_(self.source)
        return collectives.all_gather(self.flat, own, group)

    def empty(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Steals what autograd accumulated: a fresh tensor each, so no memset and no second read."""
        gradients: list[torch.Tensor | None] = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    @property
    def size(self) -> GroupSize:
        wide = self.source.dtype.itemsize
        return GroupSize(self.layout.padded, self.flat.dtype.itemsize, wide, self.trainable)


class Unit:
    """One block (or the root): its groups, where its values are, and its place in the current micro-batch.

    Attributes:
        uses: grad-enabled forwards of this micro-batch whose backward is still to come.
        begun: forwards of this micro-batch so far, for keying random streams.
        reduced: its gradients of this micro-batch are on their way.
    """

    def __init__(
        self, part: Part, index: int, plane: Plane, row: Residency, precision: Precision, pools: Pools
    ) -> None:
        self.name, self.module, self.index = part.name or "(root)", part.module, index
        self._plane, self._row = plane, row
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in part.parameters:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append((name, parameter))
        # Matrices first, then vectors: the usual weight-decay split is then two runs of each shard.
        ordered = [sorted(named, key=lambda pair: pair[1].dim() < 2) for named in kinds.values()]
        self.groups = [FlatGroup(named, plane, row, precision, pools) for named in ordered]
        self.trainable = [group for group in self.groups if group.trainable]
        self.parameters = [p for group in self.groups for p in group.parameters]
        self._names = {id(p): n for group in self.groups for n, p in zip(group.names, group.parameters, strict=True)}
        for parameter in self.parameters:
            parameter._zero_unit = self  # type: ignore[attr-defined]
        self.uses = self.begun = 0
        self.reduced = False
        self._pending: list[Pending] = []
        self.held = True
        self.on_gather: Callable[[Unit], None] = lambda unit: None
        self.release()

    def __repr__(self) -> str:
        return f"Unit({self.name}, {sum(g.layout.numel for g in self.groups):,} elements)"

    @property
    def sharded(self) -> bool:
        """Whether the values are away between uses."""
        return self._row.parameters_sharded

    def gather(self) -> None:
        """Starts bringing the values, unless they are here or on their way."""
        if self.held:
            return
        self.on_gather(self)
        self._pending = [group.fill(self._plane.gather) for group in self.groups]
        self.held = True

    def ready(self) -> None:
        """Returns when the parameters may be read."""
        self.gather()
        self.settle()

    def settle(self) -> None:
        """Waits for values on their way; the parameters may then be read."""
        if self.held:
            for work in self._pending:
                work.wait()
            self._pending = []
            guard.unguard(self.parameters)

    def release(self) -> None:
        """Stage 3: frees the values; nothing elsewhere."""
        if not self.sharded or not self.held:
            return
        self.ready()
        guard.guard(self.parameters)
        for group in self.groups:
            group.empty()
        self.held = False

    def publish(self, *, frozen: bool = False) -> None:
        """The shards' new values start for every rank, frozen ones too if they were loaded; stage 3 gathers when needed."""
        if self.sharded:
            self.release()
            return
        groups = self.groups if frozen else self.trainable
        self._pending = [group.fill(self._plane.gather) for group in groups]
        if any(not pending.done for pending in self._pending):
            guard.guard(p for group in groups for p in group.parameters)

    def touch(self, parameter: nn.Parameter, func: Any) -> None:
        """A guarded parameter is about to be read. Values that `publish` is bringing are waited for.

        A sharded unit's are refused even where a prefetch has brought them: backward would need them again, and only
        the unit's own forward arranges for that.
        """
        if self.sharded:
            guard.refuse(self._names[id(parameter)], func)
        self.settle()

    def reset(self) -> None:
        """Between micro-batches."""
        self.uses = self.begun = 0
        self.reduced = False

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for group in self.groups:
            yield from zip(group.names, group.parameters, strict=True)
