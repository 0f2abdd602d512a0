"""What a machine offers is read from the kernel's files, with the tightest limit winning."""

import os
from pathlib import Path

from paceline.plan.hardware import probe, usable_cores

GIB = 1024**3


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {32 * 1024**2} kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    found = probe(host(tmp_path, {}))
    assert (found.memory_bytes, found.memory_source) == (32 * GIB, "MemAvailable of /proc/meminfo")


def test_a_control_group_limit_counts_less_what_is_used_but_not_the_cache(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        "sys/fs/cgroup/jobs/memory.max": "max\n",
        "sys/fs/cgroup/jobs/mine/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/jobs/mine/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/jobs/mine/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    found = probe(host(tmp_path, group))
    assert (found.memory_bytes, found.memory_source) == (7 * GIB, "memory.max of the control group")


def test_the_limit_of_a_group_above_counts_too(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        "sys/fs/cgroup/jobs/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/jobs/memory.current": "0\n",
        "sys/fs/cgroup/jobs/mine/memory.max": f"{8 * GIB}\n",
    }
    assert probe(host(tmp_path, group)).memory_bytes == 4 * GIB


def test_version_1_groups_and_their_no_limit(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}\n",
    }
    assert probe(host(tmp_path, group)).memory_bytes == 15 * GIB
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert probe(tmp_path).memory_bytes == 32 * GIB


def test_bf16_by_the_flags_of_the_processor(tmp_path: Path) -> None:
    quick = probe(host(tmp_path, {"proc/cpuinfo": "processor : 0\nflags : sse avx512_bf16 avx\n"}))
    assert (quick.bf16_fast, quick.bf16_source) == (True, "the processor has avx512_bf16")
    slow = probe(host(tmp_path, {"proc/cpuinfo": "flags : sse avx2\n"}))
    assert (slow.bf16_fast, slow.bf16_source) == (False, "the processor has no bf16 instructions")
    arm = probe(host(tmp_path, {"proc/cpuinfo": "Features : fp asimd bf16\n"}))
    assert arm.bf16_fast
    assert not probe(host(tmp_path, {"proc/cpuinfo": ""})).bf16_fast


def test_cores_are_those_of_the_affinity_cut_by_the_quota(tmp_path: Path) -> None:
    mine = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == mine
    group = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert usable_cores(host(tmp_path, group)) == 1


def test_this_machine_can_be_read() -> None:
    found = probe()
    assert found.memory_bytes > 0
    assert found.cores >= 1
