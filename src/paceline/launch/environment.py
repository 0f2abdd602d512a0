"""The environment of a local rank, compatible with torchrun's; nothing the user has set is overwritten."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import InputError

__all__ = ["choose_procs", "find_port", "is_rank", "rank_environment", "visible_gpus"]

HOST = "127.0.0.1"

_KEEP_MEMORY = {
    # glibc serves large blocks by mmap and gives them back when freed, so every step faults its activations in again, page
    # by page: 9 to 16% of a step on CPU. Kept in the heap, they are reused.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher (ours, torchrun, srun with torch's variables) has made this process a rank of a run."""
    return "WORLD_SIZE" in (os.environ if environment is None else environment)


def rank_environment(
    base: Mapping[str, str], *, rank: int, procs: int, port: int, cores: int, gpus: int = 0
) -> dict[str, str]:
    """Return the whole environment of one rank.

    Args:
        base: the user's environment; its values win over ours except those that name the rank and the meeting point.
        rank: this rank, from 0.
        procs: ranks on this host, all there are.
        port: where rank 0 listens.
        cores: cores all ranks share; each gets an equal part as threads.
        gpus: devices the ranks use; 0 makes them CPU ranks, whose memory is kept.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // procs)),
        "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves a Python stack in the rank's log
    }
    if not gpus:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
        if "glibc.malloc" not in base.get("GLIBC_TUNABLES", ""):
            defaults |= _KEEP_MEMORY
    return {
        **defaults,
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": str(procs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(procs),
        "GROUP_RANK": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }


def find_port(asked: int | None) -> int:
    """Return a free port, or the one asked for if it is free.

    Raises:
        InputError: the port asked for is in use, out of range, or not allowed.
    """
    if asked is not None and not 1 <= asked <= 65535:
        raise InputError(f"Port {asked} does not exist: a port is 1 to 65535; without one a free port is taken.")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the store of rank 0 will: a port that only has old connections closing on it is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, asked or 0))
        except PermissionError:
            raise InputError(f"Port {asked} may not be opened by this user: ask for one above 1023, or none.") from None
        except OSError as error:
            raise InputError(
                f"Port {asked} is in use on {HOST} ({error.strerror}): stop its owner, ask for another, or for none and a free "
                "one is taken."
            ) from None
        return int(probe.getsockname()[1])


def visible_gpus(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> tuple[int, str]:
    """Return how many NVIDIA devices ranks may use, and what said so; CUDA_VISIBLE_DEVICES cuts the list."""
    folder = root / "proc/driver/nvidia/gpus"
    present = len(list(folder.iterdir())) if folder.is_dir() else 0
    listed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if not present or listed is None:
        return present, f"{present} in /proc/driver/nvidia/gpus"
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):
            break  # as CUDA does: the list ends at the first device that is none
        names.append(name)
    return min(present, len(names)), f"CUDA_VISIBLE_DEVICES={listed}"


def choose_procs(
    asked: int | None, environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> tuple[int, str]:
    """Return how many ranks to start here, and why: as asked, else one a GPU, else one.

    Raises:
        InputError: more ranks than visible GPUs are asked for, or fewer than one.
    """
    gpus, source = visible_gpus(environment, root)
    if asked is None:
        return (gpus, f"one a GPU ({source})") if gpus else (1, "no GPU here: one rank uses all cores")
    if asked < 1:
        raise InputError(f"{asked} ranks are asked for: at least 1 is needed.")
    if gpus and asked > gpus:
        raise InputError(
            f"{asked} ranks are asked for, but {gpus} GPUs are visible ({source}): ask for at most {gpus}, or hide all GPUs with "
            "CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    return asked, f"{asked} asked for"
