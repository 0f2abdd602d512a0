"""A Markdown table of a results file: medians over rounds, and ratios to the ideal of the same round."""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path


def main():
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    rows = [r for r in rows if "step_ms" in r]
    plans = defaultdict(list)
    for row in rows:
        plans[row["size"], row["dtype"], row["accum"], row["malloc"]].append(row)
    for (size, dtype, accumulation, malloc), found in plans.items():
        ideal = {r["round"]: r["step_ms"] for r in found if r["peer"] == "ideal"}
        reference = next((r["losses"] for r in found if r["peer"] == "reference"), None)
        print(f"\n### {size}, {dtype}, accumulation {accumulation}, malloc {malloc}\n")
        print("| peer | runs | step ms | of ideal | CPU ms a rank | peak RSS above imports, MB | loss gap | others |")
        print("|---|---|---|---|---|---|---|---|")
        peers = defaultdict(list)
        for row in found:
            peers[row["peer"]].append(row)
        lines = []
        for peer, runs in peers.items():
            ratios = [ideal[r["round"]] / r["step_ms"] for r in runs if r["round"] in ideal]
            ratio = statistics.median(ratios) if ratios else float("nan")
            gap = (
                max(abs(x - y) for x, y in zip(runs[0]["losses"], reference, strict=True))
                if reference and peer != "ideal"
                else None
            )
            middle = statistics.median
            lines.append((
                -ratio,
                f"| {peer} | {len(runs)} | {middle(r['step_ms'] for r in runs):.0f} | {ratio:.2f} | "
                f"{middle(r['cpu_ms'] for r in runs):.0f} | {middle(max(r['delta_mb']) for r in runs):.0f} | "
                f"{'-' if gap is None else f'{gap:.1e}'} | {middle(r['others'] for r in runs):.2f} |",
            ))  # fmt: skip
        print("\n".join(line for _, line in sorted(lines)))


if __name__ == "__main__":
    main()
