"""Markdown of results files: medians over rounds, ratios to the ideal of the same round, and Paceline against the best peer.

    python benchmarks/summarise.py r.jsonl [more.jsonl ...] [--all]

Runs that others disturbed are left out where a quiet one is there; `--all` keeps them.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

RIVALS = {
    "paceline-3": ("fsdp2-3", "deepspeed-3"),
    "paceline-2": ("fsdp2-2", "deepspeed-2"),
    "paceline-1": ("deepspeed-1", "ddp-zero1"),
    "paceline-0": ("ddp",),
}
"""Who Paceline's stage is measured against: the better of these."""
HEAD = (
    "peer|runs|step ms|tokens/s|of ideal|CPU ms a rank|peak RSS above imports, MB|peak heap, MB|loss gap|others".split(
        "|"
    )
)


def summary(runs: list[dict], ideal: dict[tuple[int, int], float], everything: bool) -> dict:
    """One peer's medians. Timings come from runs without the heap sampler, the heap from those with it."""
    timed = [r for r in runs if "heap_mb" not in r] or runs
    kept = timed if everything else [r for r in timed if not r.get("noisy")] or timed
    ratios = [ideal[r["round"]] / r["step_ms"] for r in kept if r["round"] in ideal]
    heaps = [max(r["heap_mb"]) for r in runs if "heap_mb" in r]
    gaps = [r["loss_gap"] for r in runs if "loss_gap" in r]
    return {
        "runs": f"{len(kept)}/{len(timed)}", "disturbed": any(r.get("noisy") for r in kept), "ratio": median(ratios) if ratios else None,
        **{key: median(r[key] for r in kept) for key in ("step_ms", "tokens_per_s", "cpu_ms", "others")},
        "rss": median(max(r["delta_mb"]) for r in kept), "heap": median(heaps) if heaps else None,
        "gap": max(gaps) if gaps else None,
    }  # fmt: skip


def line(peer: str, s: dict) -> str:
    def shown(value, form):
        return "-" if value is None else format(value, form)

    ratio = "one process" if peer == "reference" else shown(s["ratio"], ".2f")
    cells = [
        peer, s["runs"], shown(s["step_ms"], ".0f"), shown(s["tokens_per_s"], ".0f"), ratio, shown(s["cpu_ms"], ".0f"),
        shown(s["rss"], ".0f"), shown(s["heap"], ".0f"), shown(s["gap"], ".1e"), shown(s["others"], ".2f"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def verdicts(found: dict[str, dict]) -> list[str]:
    """Paceline's speed and memory over the best rival's, stage by stage."""
    lines = []
    for ours, rivals in RIVALS.items():
        there = [peer for peer in rivals if peer in found]
        if ours not in found or not there:
            continue
        parts = [
            ("speed", _over("step_ms", found, ours, there, slower=True)),
            ("RSS", _over("rss", found, ours, there)),
        ]
        if found[ours]["heap"] is not None:
            parts.append(("heap", _over("heap", found, ours, there)))
        said = ", ".join(f"{what} {ratio}" for what, ratio in parts if ratio)
        disturbed = any(found[peer]["disturbed"] for peer in (ours, *there))
        lines.append(f"- {ours}: {said}" + (" (from disturbed runs: no verdict)" if disturbed else ""))
    return lines


def _over(key: str, found: dict, ours: str, rivals: list[str], slower: bool = False) -> str:
    """`ours` over the rival with the smallest `key`; for times the ratio is turned round, so that more is better."""
    rivals = [peer for peer in rivals if found[peer][key] is not None]
    if not rivals:
        return ""
    best = min(rivals, key=lambda peer: found[peer][key])
    ratio = found[ours][key] / found[best][key]
    return f"{1 / ratio if slower else ratio:.2f}x {best}"


def read(path: Path, number: int) -> list[dict]:
    """A file's rows; the rounds of each file are its own, so that a ratio never crosses files."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    return [row | {"round": (number, row["round"])} if "round" in row else row for row in rows]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", type=Path, nargs="+")
    p.add_argument("--all", action="store_true", help="also the runs that others disturbed")
    a = p.parse_args()
    everything = a.all
    rows = [row for number, path in enumerate(a.files) for row in read(path, number)]
    for row in rows:
        if "about" in row:
            print(", ".join(f"{key} {value}" for key, value in row.items()))
    plans = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "step_ms" in row:
            plans[row["size"], row["dtype"], row["accum"], row["malloc"]][row["peer"]].append(row)
    for (size, dtype, accumulation, malloc), peers in plans.items():
        pairs = [r for r in peers.get("ideal", []) if "heap_mb" not in r]
        pairs = pairs if everything else [r for r in pairs if not r.get("noisy")] or pairs
        ideal = {r["round"]: r["step_ms"] for r in pairs}
        found = {peer: summary(runs, ideal, everything) for peer, runs in peers.items()}
        print(f"\n### {size}, {dtype}, accumulation {accumulation}, malloc {malloc}\n")
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        for peer in sorted(found, key=lambda peer: found[peer]["step_ms"]):
            print(line(peer, found[peer]))
        if said := verdicts(found):
            print("\n" + "\n".join(said))
    for row in rows:
        if "error" in row:
            print(f"\nfailed: {row['peer']} {row['flags']}: {row['error']}")


if __name__ == "__main__":
    main()
