"""Step time, memory and losses of Paceline and its peers, interleaved in one run.

    PEERS_VENV=/path/to/venv python benchmarks/throughput.py --preset quick
    PEERS_VENV=/path/to/venv python benchmarks/throughput.py --size small --dtype bf16 --rounds 3 --peers ideal,paceline-3,fsdp2-3

Two ranks with one thread each. "ideal" is two independent one-rank runs side by side: compute without communication.
"reference" is one process over the same global batch; every peer's losses are compared with it. Every side gets the same
allocator settings (`--malloc keep`: glibc keeps freed memory, as Paceline sets it for its own CPU ranks; `default`: not).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "67108864"}
PEERS = {
    "ideal": "single.py",
    "reference": "single.py --virtual-world 2",
    "ddp": "ddp.py",
    "fsdp2-2": "fsdp2.py --stage 2",
    "fsdp2-3": "fsdp2.py --stage 3",
    **{f"deepspeed-{i}": f"deepspeed_peer.py --stage {i}" for i in range(4)},
    **{f"paceline-{i}": f"paceline_peer.py --stage {i}" for i in range(4)},
}
PRESETS = {
    "quick": ["--size", "tiny", "--dtype", "bf16", "--steps", "9", "--rounds", "1"],
    "full": ["--size", "tiny", "--dtype", "bf16", "--steps", "12", "--rounds", "3"],
}


def busy_seconds():
    values = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(1)
        if busy_seconds() - before < 0.25:
            return


def start(name, world, flags, environment):
    """The processes of one peer."""
    script, *own = PEERS[name].split()
    command = [environment["PEERS_PYTHON"], str(HERE / "peers" / script), *own, "--label", name, *flags]
    alone = name in ("ideal", "reference")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(1 if name == "reference" else world):
        ranks = {} if alone else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(
                command, env=environment | ranks, cwd=tempfile.gettempdir(), stdout=pipe, stderr=pipe, text=True
            )
        )
    return processes


def measure(name, a, flags, environment):
    """One run of one peer, as a JSON-able row."""
    wait_until_quiet(a.quiet_wait)
    busy, times, began = busy_seconds(), os.times(), time.monotonic()
    outs = []
    for process in (processes := start(name, a.world, flags, environment)):
        try:
            outs.append(process.communicate(timeout=a.timeout))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            outs.append(process.communicate())
    wall, now = time.monotonic() - began, os.times()
    ours = now.children_user + now.children_system - times.children_user - times.children_system
    rows = [json.loads(line[5:]) for out, _ in outs for line in out.splitlines() if line.startswith("JSON ")]
    if not rows:
        row = {"peer": name, "error": [err.strip().splitlines()[-1:] for _, err in outs]}
    else:
        row = rows[0]
        if name == "ideal":
            row["step_ms"] = round(sum(r["step_ms"] for r in rows) / len(rows), 1)
            row["tokens_per_s"] = round(sum(r["tokens_per_s"] for r in rows), 1)
    return row | {"wall_s": round(wall, 1), "others": round((busy_seconds() - busy - ours) / wall, 2)}


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", choices=PRESETS)
    p.add_argument(
        "--peers",
        default="ideal,reference,paceline-3,fsdp2-3,deepspeed-3,paceline-2,fsdp2-2,deepspeed-2,paceline-1,deepspeed-1,paceline-0,ddp",
    )
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--timeout", type=float, default=300)
    p.add_argument("--quiet-wait", type=float, default=10, help="seconds to wait for an idle machine before each run")
    p.add_argument("--malloc", choices=("keep", "default"), default="keep")
    p.add_argument("--out", type=Path, default=HERE / "results" / "throughput.jsonl")
    argv = sys.argv[1:]
    if "--preset" in argv:
        argv = PRESETS[argv[argv.index("--preset") + 1]] + argv
    return p.parse_known_args(argv)


def main():
    a, flags = parse()
    venv = os.environ.get("PEERS_VENV")
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONWARNINGS="ignore", GLOO_SOCKET_IFNAME="lo"
    )
    environment["PEERS_PYTHON"] = f"{venv}/bin/python" if venv else sys.executable
    environment["PYTHONPATH"] = f"{HERE.parent / 'src'}:{HERE / 'peers'}"
    environment |= KEEP if a.malloc == "keep" else {}
    a.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(a.rounds):
        for name in a.peers.split(","):
            row = measure(name, a, flags, environment) | {"round": number, "malloc": a.malloc}
            with a.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = (
                "peer",
                "size",
                "dtype",
                "accum",
                "round",
                "step_ms",
                "cpu_ms",
                "steady_delta_mb",
                "final_loss",
                "others",
                "error",
            )
            print({key: row[key] for key in shown if key in row}, flush=True)


if __name__ == "__main__":
    main()
