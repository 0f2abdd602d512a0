"""`paceline.shard`: from the user's module and mesh to an engine."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.mesh.mesh import Mesh
from paceline.zero.engine import Engine


def shard(
    module: nn.Module, mesh: Mesh, *, stage: int | str = "auto", precision: str = "fp32", remat: str = "none",
    units: Sequence[str | type[nn.Module]] | None = None, shards: int | None = None, seed: int = 0,
) -> Engine:  # fmt: skip
    """Shards `module` over `mesh`. The module stays the user's object; its parameters keep shape, name and identity.

    Args:
        module: built with equal values on every rank.
        mesh: from `paceline.init()`.
        stage: 0 (data parallel) to 3 (everything sharded); "auto" is 0 on one rank and 2 on several.
        precision: "fp32" (every parameter in its own dtype), or "bf16" (float32 parameters compute in bfloat16).
        remat: "none", or "full": each block keeps its inputs only and runs again in backward.
        units: module names or classes that form a unit each; None finds the repeated blocks.
        shards: shards a replica (hybrid sharding); None: all ranks are one replica.
        seed: of the dropout streams.

    Raises:
        InputError: an impossible setting, or ranks that built different models.
    """
    if stage == "auto":
        stage = 0 if mesh.world == 1 else 2
    chosen: Any = stage
    return Engine(
        module, mesh, stage=chosen, precision=precision, remat=remat, units=units, shard=shards, seed=seed
    )  # fmt: skip
