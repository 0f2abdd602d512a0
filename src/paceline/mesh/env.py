"""Where a rank learns who it is. The only reader of the environment beside the launchers."""

import datetime
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from paceline.core.errors import InputError, RunFailed
from paceline.mesh.mesh import Mesh

TIMEOUT = datetime.timedelta(minutes=5)
"""For all ranks to come, and for any collective after that."""


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise InputError(
            f"{name} is {text!r}, but WORLD_SIZE is set, so it must be a whole number: start the ranks with "
            f"`paceline train`, torchrun or srun, which set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
        )
    return int(text)


def init(environ: Mapping[str, str] | None = None, *, timeout: datetime.timedelta = TIMEOUT) -> Mesh:
    """Joins the run that torchrun, `paceline train` or another launcher describes in the environment.

    Without WORLD_SIZE this process is a run of one rank. Raises InputError where the variables disagree and RunFailed
    where the other ranks do not come within `timeout`.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" not in environ:
        return Mesh(rank=0, world=1, local_rank=0, local_world=1, device=_device(0))
    world = _number(environ, "WORLD_SIZE", None)
    rank = _number(environ, "RANK", 0 if world == 1 else None)
    local_rank = _number(environ, "LOCAL_RANK", rank)
    local_world = _number(environ, "LOCAL_WORLD_SIZE", world)
    if not 0 <= rank < world:
        raise InputError(f"RANK={rank} with WORLD_SIZE={world}: the rank must lie in 0..{world - 1}.")
    device = _device(local_rank)
    mesh = Mesh(rank=rank, world=world, local_rank=local_rank, local_world=local_world, device=device)
    if world > 1 and not dist.is_initialized():
        _join(environ, mesh, timeout)
    return mesh


def _join(environ: Mapping[str, str], mesh: Mesh, timeout: datetime.timedelta) -> None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        raise InputError(
            f"WORLD_SIZE={mesh.world} but MASTER_ADDR={host!r} and MASTER_PORT={port!r}: both must name the address "
            f"of rank 0, which torchrun and `paceline train` set."
        )
    backend = "nccl" if mesh.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=mesh.rank, world_size=mesh.world, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise RunFailed(
            f"rank {mesh.rank} of {mesh.world} could not meet the others at {host}:{port} within "
            f"{timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}). Check that every rank was started, with "
            f"the same WORLD_SIZE, and that the port is free and reachable."
        ) from error


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            f"local rank {local_rank} has no GPU: {count} visible on this node. Start at most {count} ranks a node, "
            f"or make more visible."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
