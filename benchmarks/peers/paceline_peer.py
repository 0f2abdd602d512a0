"""Paceline, stages 0 to 3, through its public interface."""

import torch
from meter import Meter, leave
from workload import CLIP, OPT, Batches, arguments, build

import paceline

a = arguments()
mesh = paceline.init()
m = Meter(a, "paceline")
data, model = Batches(a), build(a)
engine = paceline.shard(model, mesh, stage=a.stage, precision=a.dtype)
optim = engine.optimizer(torch.optim.AdamW, **OPT)
for s in m.steps():
    for k, _ in enumerate(engine.window(a.accum * a.world)):
        x, y = data(s, k)
        engine.backward(model(x, y))
    m.loss(optim.step(max_norm=CLIP).loss)
m.report(ledger=dict(engine.memory().bytes))
leave()
