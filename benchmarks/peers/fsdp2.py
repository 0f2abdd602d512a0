"""torch FSDP2 (fully_shard): stage 3 = reshard after forward, stage 2 = keep parameters gathered until backward."""

import pg
import torch
from meter import Meter, leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from workload import OPT, Batches, arguments, build

a = arguments(prefetch=1)
pg.start()
m = Meter(a, "fsdp2")
data, model = Batches(a), build(a)
mesh = init_device_mesh("cpu", (a.world,))
kw = dict(mesh=mesh, reshard_after_forward=a.stage == 3)
if a.dtype == "bf16":
    kw["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, **kw)
fully_shard(model, **kw)
if a.prefetch:  # explicit prefetch of the next layer, as torchtitan does
    L = model.model.layers
    for i in range(len(L) - 1):
        L[i].set_modules_to_forward_prefetch([L[i + 1]])
        L[i + 1].set_modules_to_backward_prefetch([L[i]])
opt = torch.optim.AdamW(model.parameters(), fused=True, **OPT)


def sync(last):
    model.set_requires_gradient_sync(last)  # accumulate unsharded gradients, reduce once per step
    model.set_is_last_backward(last)


pg.train(a, m, model, opt, data, lambda x, y: model(x, y), set_sync=sync)
m.report()
leave()
