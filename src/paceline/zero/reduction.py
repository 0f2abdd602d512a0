"""From the gradients of micro-batches to the owner's f32 sum, over the canonical tree (`core.tree`, Note [One tree])."""

from collections import deque
from collections.abc import Generator, Sequence
from typing import cast

import torch

from paceline.core.layout import BLOCK, FlatLayout
from paceline.core.tree import Counter, Node, forest
from paceline.mesh import collectives
from paceline.mesh.collectives import Pending
from paceline.mesh.mesh import Plane
from paceline.zero.buffers import Pool, Pools, views
from paceline.zero.schedule import Window

Leaf = Sequence[torch.Tensor | None]
Waits = Generator[list[Pending], None, None]
Nodes = list[tuple[Node, torch.Tensor]]
Received = list[tuple[Pool, torch.Tensor]]


class Exchanges:
    """Reductions in flight, by phase, oldest first. Each is a generator that yields what it waits for next.

    A few at a time hide each phase behind the backward of the following units and bound the buffers they hold.
    """

    LIMIT = 2

    def __init__(self) -> None:
        self._phases: list[deque[tuple[Waits, list[Pending]]]] = []

    def start(self, exchange: Waits, phase: int = 0) -> None:
        """Begins a phase of `exchange`, after making room for it."""
        if phase == len(self._phases):
            self._phases.append(deque())
        self._advance(phase, self.LIMIT - 1)
        waits = next(exchange, None)
        if waits is not None:
            self._phases[phase].append((exchange, waits))

    def drain(self) -> None:
        """Completes all."""
        phase = 0
        while phase < len(self._phases):
            self._advance(phase, 0)
            phase += 1

    def _advance(self, phase: int, limit: int) -> None:
        """Moves the oldest on until at most `limit` are left in their `phase`."""
        while len(self._phases[phase]) > limit:
            exchange, waits = self._phases[phase].popleft()
            for pending in waits:
                pending.wait()
            self.start(exchange, phase + 1)


class GradientSum:
    """The sum of one group's gradients: local partial sums, the exchange, the owner's part of the tree.

    Args:
        layout: where the group's parameters lie. Shard `plane.shard` of it is owned here, and this replica sums a part of
            the shard, so that no rank receives or adds more for there being several replicas.
        leaf_dtype: dtype of the gradients that autograd makes; a single leaf travels in it, since casting it to the
            wider `dtype` at the owner is exact.
        dtype: dtype of all sums, at least float32.
    """

    def __init__(
        self, layout: FlatLayout, plane: Plane, pools: Pools, *, leaf_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.layout, self._plane = layout, plane
        self._leaf_dtype, self._dtype = leaf_dtype, dtype
        own, whole = layout.shard_numel, layout.padded
        self._owned = pools.of("gradients", layout, own, dtype)
        self._wholes = pools.of("gradients", layout, whole, dtype)
        self._parts = pools.of("gradients", layout, layout.part_numel, dtype)
        self._send = pools.of("send", layout, whole, leaf_dtype)
        self._pools = pools
        self._local = self._counter(self._wholes)
        self._total = self._counter(self._parts)
        self._whole: torch.Tensor | None = None

    def _counter(self, pool: Pool) -> Counter[torch.Tensor, Leaf | torch.Tensor]:
        def copy(part: Leaf | torch.Tensor) -> torch.Tensor:
            total = pool.take()
            self._write(total, part)
            return total

        def add(total: torch.Tensor, part: Leaf | torch.Tensor) -> None:
            if isinstance(part, torch.Tensor):
                add_wider(total, part)
                return
            for place, gradient in zip(views(total, self.layout), part, strict=True):
                if gradient is not None:
                    add_wider(place.view(-1), gradient.reshape(-1))

        def merge(total: torch.Tensor, right: torch.Tensor) -> None:
            total.add_(right)
            pool.give(right)

        return Counter(copy, add, merge)

    def _write(self, flat: torch.Tensor, part: Leaf | torch.Tensor) -> None:
        """`part` into `flat`; a parameter without a gradient contributes zeros."""
        if isinstance(part, torch.Tensor):
            flat.copy_(part)
            return
        places = views(flat, self.layout)
        present = [(v, g) for v, g in zip(places, part, strict=True) if g is not None]
        if present:
            torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        for place, gradient in zip(places, part, strict=True):
            if gradient is None:
                place.zero_()

    def local(self, leaf: int, gradients: Leaf) -> None:
        """Adds a leaf to this rank's partial sums."""
        self._local.push(Node(leaf, 0), gradients)

    def exchange(self, window: Window, k: int, gradients: Leaf | None) -> Waits:
        """Brings this round's partial sums to their owners, and in the last round the whole sum to this shard.

        Yields the collectives to wait for, phase by phase.
        """
        spans = [window.span(rank, k) for rank in range(window.world)]
        if self._plane.mesh.world > 1:
            parts, pool = self._outgoing(window, gradients)
            del gradients  # they are in the parts now; a waiting generator would keep them
            yield from self._deal(spans, parts, pool)
        elif gradients is not None:
            self._total.push(Node(spans[0][0], 0), gradients)
        if window.counts is not None and k == window.rounds - 1:
            yield from self.complete()

    def _outgoing(self, window: Window, gradients: Leaf | None) -> tuple[list[torch.Tensor], Pool]:
        """What this rank brings to the round, and where the buffers go back to."""
        if window.contiguous:
            parts = [total for _, total in self._local.stack]
            self._local.stack.clear()
            return parts, self._wholes
        if gradients is None:
            return [], self._send
        leaf = self._send.take()
        self._write(leaf, gradients)
        return [leaf], self._send

    def _deal(self, spans: list[tuple[int, int]], parts: list[torch.Tensor], pool: Pool) -> Waits:
        """Each shard to its rank of the replica, which sums what it got; then each part of the shard to its replica."""
        plane, nodes, received = self._plane, [], []
        hops: list[tuple[collectives.Group, list[list[Node]], int]] = []
        if plane.scatter is not None:
            ranks = plane.ranks(plane.replica)
            hops.append((plane.scatter, [forest(*spans[r]) for r in ranks], self.layout.shard_numel))
        if plane.replicate is not None:
            rows = [plane.ranks(replica) for replica in range(plane.replicas)]
            forests = [forest(spans[row[0]][0], spans[row[-1]][1]) for row in rows]
            hops.append((plane.replicate, forests, self.layout.part_numel))
        for number, (group, forests, numel) in enumerate(hops):
            if number:
                counter = self._counter(self._owned)
                self._take_in(counter, nodes, received)
                parts, pool = [total for _, total in counter.stack], self._owned
            nodes, received, waits = self._send_out(group, forests, numel, parts, pool.dtype)
            yield waits
            for part in parts:
                pool.give(part)
        self._take_in(self._total, nodes, received)

    def _send_out(
        self,
        group: collectives.Group,
        forests: list[list[Node]],
        numel: int,
        parts: list[torch.Tensor],
        dtype: torch.dtype,
    ) -> tuple[Nodes, Received, list[Pending]]:
        """Starts sending node i of every member of `group` to the owners of its chunks of `numel`, for each i."""
        nodes: Nodes = []
        received: Received = []
        waits: list[Pending] = []
        pool = self._pools.of("receive", self.layout, numel * len(forests), dtype)
        for i in range(max(map(len, forests))):
            output = pool.take()
            receive = [numel if i < len(theirs) else 0 for theirs in forests]
            mine = i < len(parts)
            source = parts[i] if mine else output[:0]
            send = [numel if mine else 0] * len(forests)
            waits.append(collectives.all_to_all(output[: sum(receive)], source, receive, send, group))
            arrived = [theirs[i] for theirs in forests if i < len(theirs)]
            nodes += [(node, output[j * numel : (j + 1) * numel]) for j, node in enumerate(arrived)]
            received.append((pool, output))
        return nodes, received, waits

    @staticmethod
    def _take_in(counter: Counter[torch.Tensor, Leaf | torch.Tensor], nodes: Nodes, received: Received) -> None:
        """Adds what came in the order of the tree and gives its buffers back."""
        for node, chunk in sorted(nodes, key=lambda pair: pair[0].start):
            counter.push(node, chunk)
        for pool, buffer in received:
            pool.give(buffer)

    def complete(self) -> Waits:
        """Ends the tree and brings the shard together from the replicas' parts; nothing where that is done."""
        if self._whole is not None:
            return
        total = self._total.fold()
        if total is None:
            total = self._parts.take()
            total.zero_()
        if self._plane.replicate is None:
            self._whole = total
            return
        whole, at = self._owned.take(), self._plane.replica * self.layout.part_numel
        own = whole[at : at + self.layout.part_numel]
        own.copy_(total)
        self._parts.give(total)
        yield [collectives.all_gather(whole, own, self._plane.replicate)]
        self._whole = whole

    def take(self) -> torch.Tensor:
        """The owned shard of the whole sum, once it is complete. `give_back` it after the step."""
        assert self._whole is not None
        whole, self._whole = self._whole, None
        return whole

    def give_back(self, total: torch.Tensor) -> None:
        self._owned.give(total)


_RUN = 1 << 16
"""Elements that are widened at a time: they stay in the cache between the cast and the addition."""


def add_wider(total: torch.Tensor, part: torch.Tensor) -> None:
    """`total += part` for a narrower `part`, both 1-D. On CPU torch's own mixed addition takes 5 times as long."""
    if total.dtype == part.dtype or total.device.type != "cpu":
        total.add_(part)
        return
    scratch = torch.empty(min(_RUN, part.numel()), dtype=total.dtype)
    for at in range(0, part.numel(), _RUN):
        wide = scratch[: min(_RUN, part.numel() - at)]
        wide.copy_(part[at : at + _RUN])
        total[at : at + _RUN].add_(wide)


def block_norms(total: torch.Tensor) -> torch.Tensor:
    """L2 norm of each block of 4,096 elements, in `total`'s dtype, [blocks]."""
    return torch.linalg.vector_norm(total.view(-1, BLOCK), dim=1)


def tree_norm(norms: torch.Tensor) -> float:
    """L2 norm from block norms in canonical order: rows of 4,096 until one is left, in f64.

    Row-wise `vector_norm` gives the same bits for any number of rows and threads, which one long sum does not.
    """
    norms = norms.double()
    while norms.numel() > 1:
        rows = -(-norms.numel() // BLOCK)
        padded = norms.new_zeros(rows * BLOCK)
        padded[: norms.numel()] = norms
        norms = torch.linalg.vector_norm(padded.view(rows, BLOCK), dim=1)
    return cast(float, norms.sum().item())
