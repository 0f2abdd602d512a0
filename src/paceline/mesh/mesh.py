"""The mesh: replicate x shard. Rank r is shard `r % S` of replica `r // S`, so shards of a replica are neighbours."""

import datetime
from typing import Any, cast

import torch
import torch.distributed as dist

from paceline.core.errors import InputError, RunFailed
from paceline.mesh.collectives import Group


class Mesh:
    """The ranks of a run. One rank alone needs no process group, and then every collective is a no-op.

    Attributes:
        patience: seconds after which `meet` says which ranks are missing.
    """

    def __init__(self, *, rank: int, world: int, local_rank: int, local_world: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.local_rank, self.local_world = local_rank, local_world
        self.device = device
        self.patience = 60.0

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world} on {self.device})"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        if self.world > 1:
            dist.barrier()

    def meet(self, what: str) -> None:
        """Returns when all ranks have come to `what`; RunFailed within `patience` seconds names those that have not."""
        if self.world == 1:
            return
        if self.device.type != "cpu":
            dist.barrier()  # NCCL has no barrier that knows who is missing
            return
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=self.patience), wait_all_ranks=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0].split("] ", 1)[-1]
            raise RunFailed(
                f"rank {self.rank} waited {self.patience:g} s at {what}, which not every rank has entered ({said}). It is "
                f"collective: call it on every rank, not under `if rank == 0`."
            ) from error

    def all_gather_object(self, value: Any) -> list[Any]:
        """Each rank's value, in rank order. Values cross between our own ranks only."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def all_gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """`row` [k] of each rank, as [world, k]; blocking, for the few numbers that ranks agree on in a step."""
        if self.world == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.world)]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def plane(self, shards: int) -> "Plane":
        """Groups for `shards` shards a replica. Collective: every rank calls it with the same number."""
        return Plane(self, shards)

    def close(self) -> None:
        """Waits for all ranks and leaves the process group (gloo aborts now and then when torn down without)."""
        if self.world > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


class Plane:
    """One engine's replicate x shard groups. Gathers and reductions each have a group of their own.

    Collectives of one group pair up by the order in which ranks issue them. A prefetched gather and a reduction may be
    issued in either order on two ranks (one of them may have skipped a layer), so they must not share a group.
    """

    def __init__(self, mesh: Mesh, shards: int) -> None:
        if shards < 1 or mesh.world % shards:
            raise InputError(
                f"shard degree {shards} does not divide the world of {mesh.world} ranks; "
                f"replicas must have equal size: choose a divisor of {mesh.world}."
            )
        self.mesh = mesh
        self.shards, self.replicas = shards, mesh.world // shards
        self.shard, self.replica = mesh.rank % shards, mesh.rank // shards
        rows = [range(r * shards, (r + 1) * shards) for r in range(self.replicas)]
        columns = [range(s, mesh.world, shards) for s in range(shards)]
        self.gather = self._mine(rows)
        self.scatter = self._mine(rows)
        self.replicate = self._mine(columns)

    def _mine(self, lines: list[range]) -> Group | None:
        """The new group that this rank is in, None where it would be alone."""
        if len(lines[0]) == 1:
            return None
        mine: Group | None = None
        for ranks in lines:
            group = dist.new_group(list(ranks))
            if self.mesh.rank in ranks:
                mine = cast("Group", group)
        return mine

    def ranks(self, replica: int) -> range:
        return range(replica * self.shards, (replica + 1) * self.shards)
