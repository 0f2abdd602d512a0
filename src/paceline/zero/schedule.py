"""Which global micro-batch a rank is at, and which leaves of the tree arrive with each reduction."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step.

    Attributes:
        counts: micro-batches of each rank; None while nobody has said (each rank then has the same, unknown number).
        contiguous: each rank has a run of neighbours and sums it locally before one reduction; otherwise round k
            reduces the k-th micro-batch of every rank, and they are numbered round by round.
    """

    world: int
    counts: tuple[int, ...] | None = None
    contiguous: bool = False

    @classmethod
    def of(cls, total: int, world: int, local_sums: bool) -> "Window":
        """`total` micro-batches, dealt over `world` ranks as evenly as they go."""
        contiguous = local_sums and 1 < world < total
        low = [rank * total // world for rank in range(world + 1)]
        counts = [len(range(rank, total, world)) for rank in range(world)]
        return cls(world, tuple(b - a for a, b in pairwise(low)) if contiguous else tuple(counts), contiguous)

    @classmethod
    def dealt(cls, counts: tuple[int, ...], local_sums: bool) -> "Window":
        """Micro-batches that the ranks already have; local sums pay only where a rank has more than one."""
        return cls(len(counts), counts, local_sums and len(counts) > 1 and max(counts) > 1)

    @property
    def rounds(self) -> int:
        """Reductions of the step, where it is known."""
        assert self.counts is not None
        return 1 if self.contiguous else max(self.counts)

    def leaves(self, rank: int) -> list[int]:
        assert self.counts is not None
        return [self.leaf(rank, k) for k in range(self.counts[rank])]

    def leaf(self, rank: int, k: int) -> int:
        """Global number of the k-th micro-batch of `rank`."""
        if self.contiguous:
            assert self.counts is not None
            return sum(self.counts[:rank]) + k
        return self.span(rank, k)[0]

    def span(self, rank: int, k: int) -> tuple[int, int]:
        """Leaves that `rank` brings to reduction number `k`."""
        if self.counts is None:
            return k * self.world + rank, k * self.world + rank + 1
        if self.contiguous:
            start = sum(self.counts[:rank])
            return start, start + self.counts[rank]
        start = sum(min(c, k) for c in self.counts) + sum(c > k for c in self.counts[:rank])
        return start, start + (self.counts[rank] > k)

    def reduces(self, rank: int, k: int) -> bool:
        """Whether the k-th micro-batch of `rank` is followed by a reduction."""
        return not self.contiguous or (self.counts is not None and k == self.counts[rank] - 1)
