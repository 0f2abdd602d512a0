"""Step time, memory and losses of Paceline and its peers, interleaved in one run (A B C A B C).

    PEERS_VENV=/path/to/venv python benchmarks/throughput.py --preset quick
    PEERS_VENV=/path/to/venv python benchmarks/throughput.py --size small --dtype bf16 --rounds 3 --peers ideal,paceline-3,fsdp2-3

Ranks have one thread each. "ideal" is as many independent one-rank runs side by side: compute without communication.
"reference" is one process over the same global batch; every peer's losses are compared with it. Every side gets the same
allocator settings (`--malloc keep`: glibc keeps freed memory, as Paceline sets it for its own CPU ranks; `default`: not).
Flags that are not listed go to the peers (`--size --dtype --accum --steps --heap 1`). Exit status 1: a peer failed, or
Paceline's losses were not the reference's.
"""

import argparse
import json
import sys
from pathlib import Path

from runner import HERE, NOISY, PEERS, about, has_deepspeed, run_peer, wait_until_quiet

ORDER = (
    "ideal reference paceline-3 fsdp2-3 deepspeed-3 paceline-2 fsdp2-2 deepspeed-2 paceline-1 deepspeed-1 ddp-zero1 "
    "paceline-0 ddp deepspeed-0"
)
PRESETS = {
    "quick": (1, ["--size tiny --dtype bf16 --steps 9"]),
    "full": (3, [
        "--size tiny --dtype bf16 --steps 12",
        "--size tiny --dtype bf16 --steps 8 --accum 4",
        "--size tiny --dtype fp32 --steps 9",
        "--size small --dtype bf16 --steps 7",
        "--size small --dtype fp32 --steps 5",
    ]),
}  # fmt: skip
AGREE = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest gap to the reference's losses. fp32: rounding of sums in another order, over a few steps. bf16: the reference
computes by autocast; systems that hold parameters in bf16 round their values too (seen: up to 1.1e-2)."""
SHOWN = (
    "peer size dtype accum round step_ms cpu_ms delta_mb heap_mb final_loss loss_gap others noisy wrong error".split()
)


def parse() -> tuple[argparse.Namespace, list[str]]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", choices=PRESETS)
    p.add_argument("--peers", default=ORDER.replace(" ", ","), help=f"of {', '.join(PEERS)}")
    p.add_argument("--rounds", type=int, help="default: the preset's, or 1")
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    p.add_argument("--quiet-wait", type=float, default=20, help="seconds to wait for an idle machine before each run")
    p.add_argument("--tries", type=int, default=1, help="runs again, so often in all, what others disturbed")
    p.add_argument("--malloc", choices=("keep", "default"), default="keep")
    p.add_argument("--out", type=Path, default=HERE / "results" / "throughput.jsonl", help="lines are appended")
    a, flags = p.parse_known_args()
    a.peers = a.peers.split(",")
    if unknown := [peer for peer in a.peers if peer not in PEERS]:
        p.error(f"--peers {','.join(unknown)}: choose from {', '.join(PEERS)}")
    return a, flags


def measure(peer: str, flags: list[str], a: argparse.Namespace) -> dict:
    """One run of one peer, as a row of the results."""
    for _ in range(a.tries):
        wait_until_quiet(a.quiet_wait)
        outcome = run_peer(peer, flags, world=a.world, malloc=a.malloc, timeout=a.timeout)
        if outcome.others < NOISY or outcome.error:
            break
    found = {"malloc": a.malloc, "wall_s": round(outcome.wall_s, 1), "others": round(outcome.others, 2)}
    if outcome.others >= NOISY:
        found["noisy"] = True
    if outcome.error or not outcome.rows:
        return {"peer": peer, "flags": " ".join(flags), "error": outcome.error or "reported nothing"} | found
    row = outcome.rows[0]
    if peer == "ideal":
        row["step_ms"] = round(sum(r["step_ms"] for r in outcome.rows) / len(outcome.rows), 1)
        row["tokens_per_s"] = round(sum(r["tokens_per_s"] for r in outcome.rows), 1)
    return row | found


def compared(row: dict, reference: list[float] | None) -> dict:
    """The row with its largest loss gap, and a mark where that is too large."""
    if reference is None or row["peer"] == "ideal" or len(reference) != len(row.get("losses", [])):
        return row
    gap = max(abs(ours - theirs) for ours, theirs in zip(row["losses"], reference))
    wrong = {} if gap <= AGREE[row["dtype"]] else {"wrong": True}
    return row | {"loss_gap": round(gap, 6)} | wrong


def rounds(case: list[str], a: argparse.Namespace, number: int) -> list[dict]:
    """All rounds of one case; the reference runs in the first only, since it gives losses and no ratio."""
    rows: list[dict] = []
    reference = None
    for this in range(number):
        for peer in a.peers:
            if peer == "reference" and this:
                continue
            row = measure(peer, case, a) | {"round": this}
            if peer == "reference":
                reference = row.get("losses")
            rows.append(compared(row, reference))
            with a.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print({key: rows[-1][key] for key in SHOWN if key in rows[-1]}, flush=True)
    return rows


def main() -> int:
    a, flags = parse()
    number, cases = PRESETS[a.preset] if a.preset else (1, [""])
    if any(peer.startswith("deepspeed") for peer in a.peers) and not has_deepspeed():
        print("DeepSpeed is left out: this Python has none (set PEERS_VENV, see benchmarks/README.md)")
        a.peers = [peer for peer in a.peers if not peer.startswith("deepspeed")]
    a.out.parent.mkdir(parents=True, exist_ok=True)
    with a.out.open("a") as file:
        file.write(json.dumps(about()) + "\n")
    rows = [row for case in cases for row in rounds(case.split() + flags, a, a.rounds or number)]
    print(f"python benchmarks/summarise.py {a.out}")
    return int(any("error" in row or ("wrong" in row and row["peer"].startswith("paceline")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
