"""What this process uses."""

import resource
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_bytes() -> int:
    """Memory of this rank: allocated on its GPU at the most, or resident on the host now."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
