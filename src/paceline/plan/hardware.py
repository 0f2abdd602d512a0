"""What this machine offers, read from the kernel's files without torch: memory that is free to use, cores, quick bf16."""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hardware", "probe", "usable_cores"]

_NO_LIMIT = 1 << 60
_QUICK_BF16 = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One host. Memory is what all ranks here may share, in bytes; each figure says where it was read."""

    memory_bytes: int
    memory_source: str
    cores: int
    bf16_fast: bool
    bf16_source: str


def probe(root: Path = Path("/")) -> Hardware:
    """Read this host; `root` stands for `/` in tests."""
    memory, source = _memory(root)
    fast, flag = _bf16(root)
    return Hardware(memory, source, usable_cores(root), fast, flag)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores this process may use: its affinity, cut by a cgroup's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in _cgroup_folders(root):
        quota, _, period = (_read(folder / "cpu.max") or "max 100000").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def _memory(root: Path) -> tuple[int, str]:
    """The least of what the kernel calls available and what each cgroup above us leaves."""
    found: list[tuple[int, str]] = []
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append((int(rest.split()[0]) * 1024, "MemAvailable of /proc/meminfo"))
    for folder in _cgroup_folders(root):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read(folder / limit_name)
            if limit is None or not limit.isdigit() or int(limit) >= _NO_LIMIT:
                continue
            used = int(_read(folder / used_name) or 0) - _stat(folder / "memory.stat", cache_name)
            found.append((max(0, int(limit) - max(0, used)), f"{limit_name} of the control group"))
    if not found and hasattr(os, "sysconf"):
        pages = os.sysconf("SC_PHYS_PAGES")
        found.append((pages * os.sysconf("SC_PAGE_SIZE") // 2, "half of the physical memory"))
    return min(found)


def _cgroup_folders(root: Path) -> list[Path]:
    """Folders of the control groups (v2 and v1 memory) this process is in, from its own up to the top."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        here = top / path.strip("/")
        # In a container the path is the host's while the mount shows only our own group: then `top` is ours.
        while here != top and top in here.parents:
            folders.append(here)
            here = here.parent
        folders.append(top)
    return [folder for folder in folders if folder.is_dir()]


def _bf16(root: Path) -> tuple[bool, str]:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            known = set(flags.split())
            quick = next((flag for flag in (*_QUICK_BF16, "bf16") if flag in known), None)
            return (True, f"the processor has {quick}") if quick else (False, "the processor has no bf16 instructions")
    return False, "the processor's instructions are unknown"


def _stat(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
