"""Where each parameter lies in a unit's flat buffer, and which part of it a rank owns.

The layout is a function of the parameters alone: blocks of 4,096 elements, every parameter aligned to 32 elements
(64 bytes in bf16), so that the same element sits at the same place of the same block at every world size and stage.
A shard is a run of whole blocks, and so is each replica's part of it, which is what one rank sums; only the padding behind
the last block depends on their numbers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

BLOCK = 4096
ALIGN = 32


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: elements `[offset, offset + numel)` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements `[start, stop)` of a flattened parameter, found at `at` in the buffer that was asked about."""

    slot: Slot
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Slots in order, cut into `shards` equal runs of whole blocks, each of `replicas` equal parts."""

    slots: tuple[Slot, ...]
    numel: int
    shards: int
    replicas: int = 1

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, tuple[int, ...]]], shards: int, replicas: int = 1) -> "FlatLayout":
        slots: list[Slot] = []
        end = 0
        for name, shape in parameters:
            slot = Slot(name, tuple(shape), end)
            slots.append(slot)
            end += -(-slot.numel // ALIGN) * ALIGN
        return cls(tuple(slots), end, shards, replicas)

    @property
    def pattern(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of each slot: layouts of one pattern can share buffers, whose gaps stay zero."""
        return tuple((slot.offset, slot.numel) for slot in self.slots)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Runs of the padded buffer that belong to no parameter."""
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                yield end, slot.offset
            end = slot.offset + slot.numel
        if end < self.padded:
            yield end, self.padded

    @property
    def blocks(self) -> int:
        """Real blocks; those that pad the last shards are not counted."""
        return -(-self.numel // BLOCK)

    @property
    def part_numel(self) -> int:
        """Elements of a shard that one replica sums, a multiple of BLOCK."""
        return -(-self.blocks // (self.shards * self.replicas)) * BLOCK

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.part_numel * self.replicas

    @property
    def padded(self) -> int:
        return self.shard_numel * self.shards

    def intervals(self, shard: int) -> Iterator[Interval]:
        """The parts of parameters that shard number `shard` holds; `at` counts from the start of the shard."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        for slot in self.slots:
            start, stop = max(low, slot.offset), min(high, slot.offset + slot.numel)
            if start < stop:
                yield Interval(slot, start - slot.offset, stop - slot.offset, start - low)
