"""Reference: one process. Alone it is the loss reference; two of them at once are the 'ideal' compute-only pair."""

import time

import torch
from meter import Meter
from workload import CLIP, OPT, Batches, arguments, autocast, build

a = arguments()
m = Meter(a, "single")
model, data = build(a), Batches(a)
opt = torch.optim.AdamW(model.parameters(), fused=True, **OPT)
micros = a.accum * (a.virtual_world or 1)
opt_ms = []
for s in m.steps():
    total = 0.0
    for k in range(micros):
        x, y = data(s, k)
        with autocast(a):
            loss = model(x, y)
        (loss / micros).backward()
        total += loss.item()
    t = time.perf_counter()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    opt.step()
    opt.zero_grad(set_to_none=True)
    opt_ms.append((time.perf_counter() - t) * 1e3)
    m.loss(total / micros)
m.report(
    opt_ms=round(sorted(opt_ms[a.warmup :])[len(opt_ms[a.warmup :]) // 2], 1),
    params=sum(p.numel() for p in model.parameters()),
)
