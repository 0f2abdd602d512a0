"""torch DistributedDataParallel + fused AdamW (stage 0), or + ZeroRedundancyOptimizer (stage 1)."""

import pg
import torch
from meter import Meter, leave
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from workload import OPT, Batches, arguments, autocast, build

a = arguments(bucket=25.0)
pg.start()
m = Meter(a, "ddp" if a.stage == 0 else "ddp+ZeroRedundancyOptimizer")
data = Batches(a)
model = DDP(build(a), gradient_as_bucket_view=True, static_graph=a.accum == 1, bucket_cap_mb=a.bucket)
if a.stage:
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **OPT
    )
else:
    opt = torch.optim.AdamW(model.parameters(), fused=True, **OPT)


def forward(x, y):
    with autocast(a):
        return model(x, y)


pg.train(a, m, model, opt, data, forward, model.no_sync)
m.report()
leave()
