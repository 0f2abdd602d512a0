"""Starts the ranks of a peer, waits for them, and says how much of the machine others took meanwhile."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "67108864"}
PEERS = {
    "ideal": "single.py",
    "reference": "single.py --virtual-world {world}",
    "ddp": "ddp.py",
    "ddp-zero1": "ddp.py --stage 1",
    "fsdp2-2": "fsdp2.py --stage 2",
    "fsdp2-3": "fsdp2.py --stage 3",
    **{f"deepspeed-{stage}": f"deepspeed_peer.py --stage {stage}" for stage in range(4)},
    **{f"paceline-{stage}": f"paceline_peer.py --stage {stage}" for stage in range(4)},
}
NOISY = 0.25
"""Cores that other programs may take before a run counts as disturbed."""


def python() -> str:
    """The interpreter of the peers: that of $PEERS_VENV, or the one that runs this."""
    venv = os.environ.get("PEERS_VENV")
    return str(Path(venv).resolve() / "bin" / "python") if venv else sys.executable


def has_deepspeed() -> bool:
    find = "import importlib.util as u; raise SystemExit(u.find_spec('deepspeed') is None)"
    return subprocess.run([python(), "-c", find]).returncode == 0


def environment(malloc: str) -> dict[str, str]:
    """One thread a rank, loopback, and the allocator as asked, whatever the caller's shell says about it."""
    clean = {key: value for key, value in os.environ.items() if key not in (*KEEP, "GLIBC_TUNABLES")}
    return clean | {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE / 'peers'}", **(KEEP if malloc == "keep" else {}),
    }  # fmt: skip


def ranks(world: int) -> list[dict[str, str]]:
    """What each rank of a new group finds in its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(world)
    ]  # fmt: skip


def busy_seconds() -> float:
    """CPU seconds that all programs have used since the machine started."""
    values = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(seconds: float) -> None:
    """Returns when the machine was idle for a second, at the latest after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(1)
        if busy_seconds() - before < NOISY:
            return


@dataclass(frozen=True)
class Outcome:
    """`rows`: what the processes reported; `error`: the last line of the first that failed; `others`: cores, a mean."""

    rows: list[dict]
    error: str
    wall_s: float
    others: float


def command(peer: str, flags: list[str], world: int, *, traced: bool = False) -> list[str]:
    script, *own = PEERS[peer].format(world=world).split()
    first = [str(HERE / "peers" / "traced.py"), script] if traced else [str(HERE / "peers" / script)]
    return [python(), *first, *own, "--label", peer, *flags]


def run_peer(peer: str, flags: list[str], *, world: int, malloc: str, timeout: float, traced: bool = False) -> Outcome:
    """One run of one peer: the pair for "ideal", one process for "reference", else `world` ranks."""
    alone = {"ideal": [{}] * world, "reference": [{}]}
    places = alone[peer] if peer in alone else ranks(world)
    return run(command(peer, flags, world, traced=traced), places, environment(malloc), timeout)


def run(command: list[str], places: list[dict[str, str]], shared: dict[str, str], timeout: float) -> Outcome:
    """One process for each of `places`; a process that fails, or the time limit, ends them all."""
    busy, times, began = busy_seconds(), os.times(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(places))]
        processes = []
        for place, (out, err) in zip(places, files):
            with out.open("w") as o, err.open("w") as e:
                processes.append(subprocess.Popen(command, env=shared | place, cwd=folder, stdout=o, stderr=e))
        late = _wait(processes, began + timeout)
        lines = [line for out, _ in files for line in out.read_text().splitlines()]
        failed = [err for p, (_, err) in zip(processes, files) if p.returncode]
        said = [err.read_text().strip().splitlines()[-1:] for err in failed]
    wall, now = time.monotonic() - began, os.times()
    ours = now.children_user + now.children_system - times.children_user - times.children_system
    error = f"over {timeout:g} s" if late else "; ".join(line for tail in said for line in tail)
    rows = [json.loads(line.removeprefix("JSON ")) for line in lines if line.startswith("JSON ")]
    return Outcome(rows, error or ("failed" if failed else ""), wall, (busy_seconds() - busy - ours) / wall)


def _wait(processes: list[subprocess.Popen], end: float) -> bool:
    """Waits for all; True if the time was up. After a failure the others get a few seconds."""
    late = False
    while None in (codes := [p.poll() for p in processes]):
        if any(codes):
            end = min(end, time.monotonic() + 5)
        elif time.monotonic() > end:
            late = True
        if time.monotonic() > end:
            for p in processes:
                p.kill()
            for p in processes:
                p.wait()
        time.sleep(0.05)
    return late


def about() -> dict:
    """Where and on what: the first line of a results file."""
    ask = "import json, torch; print(json.dumps([torch.__version__, torch.backends.cpu.get_cpu_capability()]))"
    torch, capability = json.loads(subprocess.run([python(), "-c", ask], capture_output=True, check=True).stdout)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "about": time.strftime("%Y-%m-%d %H:%M"), "commit": commit.stdout.strip(), "torch": torch,
        "python": platform.python_version(), "capability": capability, "cores": os.cpu_count(),
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
    }  # fmt: skip
