"""Paceline's canonical tree over an all-to-all, against torch's reduce-scatter and all-reduce, on gloo.

    python benchmarks/reduction.py                    # 2 and 4 ranks; gradients of 1, 4, 16 and 64 MB of float32
    python benchmarks/reduction.py --gradients bf16   # bf16 gradients summed in float32 by every way

One leaf a rank, blocking, from fresh gradients to the owner's float32 sum; the largest over ranks, median of repetitions.
The tree sends bf16 leaves as they are, since the owner's cast is exact; torch's collectives need float32 before they add.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable

from runner import environment, python, ranks, run

SIZES_MB = (1, 4, 16, 64)
WAYS = ("tree", "reduce_scatter", "all_reduce")


def ways(numel: int, dtype) -> dict[str, Callable]:
    """Each brings this rank's slice of the sum; all take the same gradient."""
    import torch
    import torch.distributed as dist

    from paceline.core.layout import FlatLayout
    from paceline.mesh.mesh import Mesh, Plane
    from paceline.zero.buffers import Pools
    from paceline.zero.reduction import Exchanges, GradientSum
    from paceline.zero.schedule import Window

    rank, world, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    mesh = Mesh(rank=rank, world=world, local_rank=rank, local_world=world, device=cpu)
    layout = FlatLayout.of([("w", (numel,))], world)
    total = GradientSum(layout, Plane(mesh, world), Pools(cpu), leaf_dtype=dtype, dtype=torch.float32)
    gradient = torch.full((numel,), rank + 1.0, dtype=dtype)
    whole, own = torch.empty(layout.padded), torch.empty(layout.shard_numel)
    exchanges, window = Exchanges(), Window.of(world, world, False)

    def tree():
        exchanges.start(total.exchange(window, 0, [gradient]))
        exchanges.drain()
        found = total.take()
        total.give_back(found)
        return found

    def reduce_scatter():
        whole[:numel].copy_(gradient)
        dist.reduce_scatter_tensor(own, whole)
        return own

    def all_reduce():
        whole[:numel].copy_(gradient)
        dist.all_reduce(whole)
        return whole[: layout.shard_numel]

    return {"tree": tree, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def rank_main(a: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = world * (world + 1) / 2
    for megabytes in SIZES_MB:
        numel = megabytes * 2**20 // 4
        found = ways(numel, torch.bfloat16 if a.gradients == "bf16" else torch.float32)
        taken = {way: [] for way in WAYS}
        for repetition in range(a.repetitions + 1):
            for way in WAYS:
                dist.barrier()
                began = time.perf_counter()
                result = found[way]()
                seconds = torch.tensor(time.perf_counter() - began)
                assert result[0] == expected, f"{way} gave {result[0]}, not {expected}"
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if repetition:
                    taken[way].append(1e3 * seconds.item())
        if rank == 0:
            medians = {f"{way}_ms": round(statistics.median(ms), 2) for way, ms in taken.items()}
            print("JSON " + json.dumps({"world": world, "mb": megabytes, "gradients": a.gradients} | medians))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32")
    p.add_argument("--repetitions", type=int, default=11)
    p.add_argument("--worlds", default="2,4")
    p.add_argument("--malloc", choices=("keep", "default"), default="keep")
    a = p.parse_args()
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        rank_main(a)
        return
    print(
        "| ranks | MB of float32 | tree ms | reduce-scatter ms | all-reduce ms | tree is faster than reduce-scatter by |"
    )
    print("|---|---|---|---|---|---|")
    for world in map(int, a.worlds.split(",")):
        flags = ["--gradients", a.gradients, "--repetitions", str(a.repetitions)]
        outcome = run([python(), os.path.abspath(__file__), *flags], ranks(world), environment(a.malloc), 300)
        if outcome.error:
            raise SystemExit(f"{world} ranks: {outcome.error}")
        for row in outcome.rows:
            times = [row[f"{way}_ms"] for way in WAYS]
            print(f"| {world} | {row['mb']} | {' | '.join(f'{t:.2f}' for t in times)} | {times[1] / times[0]:.1f}x |")


if __name__ == "__main__":
    main()
