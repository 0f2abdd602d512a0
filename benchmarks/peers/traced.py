"""Runs a peer's script with every collective, every wait and Paceline's gradient sums marked in the trace.

python traced.py fsdp2.py --stage 3 --trace t.json ...
"""

import functools
import importlib.util
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

script = sys.argv.pop(1)
COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor broadcast barrier "
    "all_to_all_single all_gather_object"
)


def mark(owner, name, kind):
    """Makes calls of `owner.name` visible in the trace under `kind`."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def marked(*args, **kwargs):
        with torch.profiler.record_function(f"{kind} {name}"):
            return call(*args, **kwargs)

    setattr(owner, name, marked)


for each in COLLECTIVES.split():
    mark(dist, each, "COLLECTIVE")
mark(dist.Work, "wait", "COLLECTIVE")
if script == "paceline_peer.py" and importlib.util.find_spec("paceline"):
    from paceline.zero.reduction import Exchanges, GradientSum

    mark(Exchanges, "start", "SUM")
    mark(Exchanges, "drain", "SUM")
    mark(GradientSum, "local", "SUM")
    mark(GradientSum, "finish", "SUM")
runpy.run_path(str(Path(__file__).parent / script), run_name="__main__")
