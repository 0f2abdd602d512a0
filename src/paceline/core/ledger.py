"""The memory ledger: bytes by category, planned by arithmetic, measured by the engine, subtracted in tests."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.tree import most_held

CATEGORIES = ("parameters", "gradients", "master", "moments", "buffers", "exchange")
"""parameters: the flat compute buffers that rest between steps (stage 3: none, beyond the master they are cast from)
gradients: f32 sums that live from a reduction to the optimizer step, and accumulation buffers
master: the f32 (or wider) copy that the optimizer updates, where it is not the parameter buffer itself
moments: the optimizer's state   buffers: the module's own buffers   exchange: reusable send and receive buffers
"""


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of one rank, by category. `a - b` subtracts category by category."""

    bytes: Mapping[str, int] = field(default_factory=dict[str, int])

    def __getitem__(self, category: str) -> int:
        return self.bytes.get(category, 0)

    def __sub__(self, other: "MemoryLedger") -> "MemoryLedger":
        return MemoryLedger({c: self[c] - other[c] for c in CATEGORIES})

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def table(self) -> str:
        """One line a category, in MiB."""
        rows = [(c, self[c]) for c in CATEGORIES] + [("total", self.total)]
        return "\n".join(f"  {name:<11}{count / 2**20:>10.1f} MiB" for name, count in rows)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What the arithmetic needs to know of `count` groups of one layout: padded elements, element sizes in bytes."""

    padded: int
    compute_bytes: int
    master_bytes: int
    trainable: bool
    count: int = 1


def planned_states(
    groups: Iterable[GroupSize],
    *,
    shards: int,
    replicas: int = 1,
    parameters_sharded: bool,
    moments: int,
    owner_rounds: Sequence[Sequence[tuple[int, int]]] = (((0, 1),),),
    local_rounds: Sequence[Sequence[tuple[int, int]]] = (),
) -> MemoryLedger:
    """Model states of one rank in bytes.

    `moments` is the number of state tensors per parameter (AdamW 2, SGD with momentum 1, SGD 0). The rounds are the
    spans of leaves that arrive at the owner, and in this rank's own sums, one after the other (`core.tree.most_held`);
    with local sums the gradients are an upper bound, since a buffer that was sent may serve the next unit. Replicas sum a
    part of the shard each and put it together in the last round.
    With P elements, S shards and AdamW in bf16 this is the table of the ZeRO paper (arXiv 1910.02054, section 5):
    stages 1 and 2 rest at 2P + (4 + 8 + 4)P/S, stage 3 at (4 + 8 + 4)P/S since bf16 is cast from the master when gathered.
    """
    sums: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for group in groups:
        whole, shard = group.count * group.padded, group.count * group.padded // shards
        if not parameters_sharded:
            sums["parameters"] += whole * group.compute_bytes
        elif not group.trainable:
            sums["parameters"] += shard * group.compute_bytes
        if group.trainable:
            if parameters_sharded or group.master_bytes != group.compute_bytes:
                sums["master"] += shard * group.master_bytes
            sums["moments"] += moments * shard * group.master_bytes
            owned = most_held(owner_rounds, group.count, int(replicas == 1)) * (group.padded // (shards * replicas))
            owned += whole // shards if replicas > 1 else 0
            local = most_held(local_rounds, group.count) * group.padded
            sums["gradients"] += (owned + local) * group.master_bytes
    return MemoryLedger(sums)
