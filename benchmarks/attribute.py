"""Where a step goes: milliseconds of rank 0's main thread by kind, in the last step of a traced run.

    PEERS_VENV=/path/to/venv python benchmarks/attribute.py --peers paceline-3,fsdp2-3 --size small --dtype bf16

Kinds: matrix products and attention; other compute; copies (casts, gathering and summing of gradients, memory set);
optimizer and clipping; collectives (starting them, and waiting for them); Python (interpreter, autograd engine, gaps).
Beside it: CPU time of the process's other threads, which is gloo's communication. Tracing itself slows the step: "untraced"
is the median of the steps before it.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

from runner import PEERS, run_peer, wait_until_quiet

KINDS = {
    "collectives": r"^COLLECTIVE|^c10d::|^gloo:",
    "optimizer": r"_fused_adamw|linalg_vector_norm|aten::norm|_foreach_(norm|mul|addcmul|addcdiv|sqrt|lerp)",
    "copies": r"^SUM|_foreach_copy|_foreach_add|aten::(copy_|cat|fill_|zero_|clone|_to_copy|_chunk_cat|split_with_sizes_copy)|^fsdp::",
    "products": r"aten::(mm|addmm|bmm|linear)$|scaled_dot|_flash_attention",
    "other compute": r"^aten::",
}
"""By name, the first that fits. Everything inside a collective counts as collective; inside Paceline's sums as copies."""
COLUMNS = ("products", "other compute", "copies", "optimizer", "collectives", "Python")


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "Python")


def own_times(events: list[dict]) -> tuple[Counter, Counter]:
    """Milliseconds of one thread by kind and by name, each event without those inside it."""
    by_kind, by_name = Counter(), Counter()
    stack: list[dict] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            _close(stack.pop(), by_kind, by_name)
        event["own"], event["kind"] = event["dur"], kind(event["name"])
        if stack:
            stack[-1]["own"] -= event["dur"]
            around = stack[-1]["kind"]
            if around == "collectives" or (around == "copies" and event["kind"] != "collectives"):
                event["kind"] = around
        stack.append(event)
    for event in stack:
        _close(event, by_kind, by_name)
    return by_kind, by_name


def _close(event: dict, by_kind: Counter, by_name: Counter) -> None:
    by_kind[event["kind"]] += event["own"] / 1e3
    by_name[event["name"]] += event["own"] / 1e3


def main_thread(trace: Path) -> list[dict]:
    """The operators and marks of the thread that multiplies matrices."""
    found = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in found if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    threads = Counter(e["tid"] for e in spans if e["name"] == "aten::mm")
    thread = threads.most_common(1)[0][0]
    return [e for e in spans if e["tid"] == thread and not e["name"].startswith("ProfilerStep")]


def attribute(peer: str, flags: list[str], a: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        wait_until_quiet(a.quiet_wait)
        flags = [*flags, "--trace", str(trace)]
        outcome = run_peer(peer, flags, world=a.world, malloc=a.malloc, timeout=a.timeout, traced=True)
        if outcome.error:
            return {"peer": peer, "error": outcome.error}
        events = main_thread(trace)
    row = outcome.rows[0]
    by_kind, by_name = own_times(events)
    step = row["traced_ms"]
    by_kind["Python"] += step - sum(by_kind.values())
    return {
        "peer": peer, "size": row["size"], "dtype": row["dtype"], "accum": row["accum"], "malloc": a.malloc,
        "step_ms": round(step), "untraced_ms": round(row["step_ms"]), **{k: round(by_kind[k]) for k in COLUMNS},
        "other_threads_cpu_ms": round(row["cpu_ms"] - row["main_cpu_ms"]), "events": len(events),
        "others": round(outcome.others, 2), "top": {n: round(ms, 1) for n, ms in by_name.most_common(12)},
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", default="ideal,paceline-3,fsdp2-3,deepspeed-3", help=f"of {', '.join(PEERS)}")
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--timeout", type=float, default=300)
    p.add_argument("--quiet-wait", type=float, default=20)
    p.add_argument("--malloc", choices=("keep", "default"), default="keep")
    p.add_argument("--top", action="store_true", help="also print the operators that took longest")
    p.add_argument("--out", type=Path, help="append JSON lines here")
    a, flags = p.parse_known_args()
    head = ["peer", "step ms (traced)", "untraced", *COLUMNS, "other threads, CPU", "events", "others"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for peer in a.peers.split(","):
        row = attribute(peer, flags, a)
        if a.out:
            with a.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if "error" in row:
            print(f"| {peer} | failed: {row['error']} |")
            continue
        keys = ("peer", "step_ms", "untraced_ms", *COLUMNS, "other_threads_cpu_ms", "events", "others")
        print(f"| {' | '.join(str(row[key]) for key in keys)} |", flush=True)
        if a.top:
            print("|  | " + ", ".join(f"{name} {ms}" for name, ms in row["top"].items()) + " |")


if __name__ == "__main__":
    main()
