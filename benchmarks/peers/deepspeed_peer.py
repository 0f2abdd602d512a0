"""DeepSpeed stages 0-3: real deepspeed.initialize, engine.backward, engine.step; CPU accelerator, gloo."""

import os

os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
import logging

import deepspeed
import torch
from meter import Meter, leave
from workload import CLIP, OPT, Batches, arguments, build

a = arguments(overlap=1, optimizer="torch", bucket=0)
logging.disable(logging.INFO)
deepspeed.init_distributed("gloo")
m = Meter(a, "deepspeed")
config = {
    "train_micro_batch_size_per_gpu": a.micro,
    "gradient_accumulation_steps": a.accum,
    "gradient_clipping": CLIP,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": a.dtype == "bf16"},
    "zero_optimization": {"stage": a.stage, "overlap_comm": bool(a.overlap), "contiguous_gradients": True},
}
if a.bucket:
    config["zero_optimization"].update(reduce_bucket_size=a.bucket, allgather_bucket_size=a.bucket)
data, model = Batches(a), build(a)
if a.optimizer == "torch":
    kw = dict(optimizer=torch.optim.AdamW(model.parameters(), fused=True, **OPT))
else:  # DeepSpeed's own CPU FusedAdam, built at run time
    kw = dict(model_parameters=model.parameters())
    config["optimizer"] = {"type": "AdamW", "params": {**OPT, "betas": list(OPT["betas"])}}
engine, opt, _, _ = deepspeed.initialize(model=model, config=config, **kw)
for s in m.steps():
    total = 0.0
    for k in range(a.accum):
        x, y = data(s, k)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    m.loss(total / a.accum)
m.report(optimizer=type(getattr(opt, "optimizer", opt)).__name__)
leave()
