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


class Exchanges:
    """Reductions in flight, oldest first. Each is a generator that yields what it waits for next.

    A few at a time hide the exchange behind the backward of the following units and bound the buffers they hold.
    """

    LIMIT = 2

    def __init__(self) -> None:
        self._running: deque[tuple[Waits, list[Pending]]] = deque()

    def start(self, exchange: Waits) -> None:
        self.drain(self.LIMIT - 1)
        first = next(exchange, None)
        if first is not None:
            self._running.append((exchange, first))

    def drain(self, limit: int = 0) -> None:
        """Completes the oldest until at most `limit` are left."""
        while len(self._running) > limit:
            exchange, waits = self._running.popleft()
            while True:
                for pending in waits:
                    pending.wait()
                following = next(exchange, None)
                if following is None:
                    break
                waits = following


class GradientSum:
    """The sum of one group's gradients: local partial sums, the exchange, the owner's part of the tree.

    Args:
        layout: where the group's parameters lie; shard `plane.shard` of it is owned here.
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
        self._send = pools.of("send", layout, whole, leaf_dtype)
        self._pools = pools
        self._local = self._counter(self._wholes)
        self._total = self._counter(self._owned)

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
        """Brings this round's partial sums to their owners. Yields the collectives to wait for, phase by phase."""
        spans = [window.span(rank, k) for rank in range(window.world)]
        if self._plane.mesh.world == 1:
            if gradients is not None:
                self._total.push(Node(spans[0][0], 0), gradients)
            return
        if window.contiguous:
            parts, give_back, dtype = [total for _, total in self._local.stack], self._wholes, self._dtype
            self._local.stack.clear()
        else:
            parts, give_back, dtype = [], self._send, self._leaf_dtype
            if gradients is not None:
                parts.append(self._send.take())
                self._write(parts[0], gradients)
        del gradients
        found, received, waits = self._scatter(spans, parts, dtype)
        if self._plane.scatter is not None:
            yield waits
            for part in parts:
                give_back.give(part)
            if self._plane.replicate is not None:
                parts, give_back, dtype = self._within_replica(found), self._owned, self._dtype
        if self._plane.replicate is not None:
            found, more, waits = self._replicate(spans, parts, dtype)
            yield waits
            received += more
            for part in parts:
                give_back.give(part)
        for node, chunk in sorted(found, key=lambda pair: pair[0].start):
            self._total.push(node, chunk)
        for pool, buffer in received:
            pool.give(buffer)

    Found = list[tuple[Node, torch.Tensor]]
    Received = list[tuple[Pool, torch.Tensor]]

    def _scatter(
        self, spans: list[tuple[int, int]], parts: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[Found, Received, list[Pending]]:
        """Starts sending node i of every rank to the owners in its replica, for each i."""
        plane, n = self._plane, self.layout.shard_numel
        found: GradientSum.Found = []
        received: GradientSum.Received = []
        waits: list[Pending] = []
        if plane.scatter is None:
            return found, received, waits
        forests = [forest(*spans[rank]) for rank in plane.ranks(plane.replica)]
        pool = self._pools.of("receive", self.layout, self.layout.padded, dtype)
        for i in range(max(map(len, forests))):
            output = pool.take()
            receive = [n if i < len(nodes) else 0 for nodes in forests]
            mine = i < len(parts)
            source = parts[i] if mine else output[:0]
            send = [n if mine else 0] * plane.shards
            waits.append(collectives.all_to_all(output[: sum(receive)], source, receive, send, plane.scatter))
            at = 0
            for nodes in forests:
                if i < len(nodes):
                    found.append((nodes[i], output[at : at + n]))
                    at += n
            received.append((pool, output))
        return found, received, waits

    def _within_replica(self, found: Found) -> list[torch.Tensor]:
        """The partial sums of this replica's leaves, one for each aligned subtree."""
        counter = self._counter(self._owned)
        for node, chunk in sorted(found, key=lambda pair: pair[0].start):
            counter.push(node, chunk)
        return [total for _, total in counter.stack]

    def _replicate(
        self, spans: list[tuple[int, int]], parts: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[Found, Received, list[Pending]]:
        """Starts sending every replica's partial sums of this shard to all replicas."""
        plane, n = self._plane, self.layout.shard_numel
        ranks = [plane.ranks(replica) for replica in range(plane.replicas)]
        forests = [forest(spans[r[0]][0], spans[r[-1]][1]) for r in ranks]
        pool = self._pools.of("receive", self.layout, n * plane.replicas, dtype)
        found: GradientSum.Found = []
        received: GradientSum.Received = []
        waits: list[Pending] = []
        for i in range(max(map(len, forests))):
            output = pool.take()
            own = parts[i] if i < len(parts) else output[plane.replica * n : (plane.replica + 1) * n]
            waits.append(collectives.all_gather(output, own, plane.replicate))
            found += [(nodes[i], output[r * n : (r + 1) * n]) for r, nodes in enumerate(forests) if i < len(nodes)]
            received.append((pool, output))
        return found, received, waits

    def finish(self) -> torch.Tensor:
        """The owned shard of the whole sum; all exchanges must be complete. `give_back` it after the step."""
        total = self._total.fold()
        if total is None:
            total = self._owned.take()
            total.zero_()
        return total

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
