"""The engine in a loop of your own: five lines of Paceline, and the model is still the model.

    python examples/own_loop.py                                          one process
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py        two ranks, ZeRO-2
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py 3      ZeRO-3

Every way prints the same losses, to the last digit. Run it again and it goes on from its checkpoint.
"""

import sys

import torch
from torch import nn

import paceline

STEPS, MICRO_BATCHES = 20, 4
stage = int(sys.argv[1]) if sys.argv[1:2] not in ([], ["auto"]) else "auto"
folder = sys.argv[2] if len(sys.argv) > 2 else "runs/own-loop"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `number` of a step: a function of its number, so that any world size sees the same data."""
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + number)
    x = torch.randn(32, 16, generator=generator)
    return x, x.square().mean(dim=1, keepdim=True)


mesh = paceline.init()
engine = paceline.shard(model, mesh, stage=stage)
optim = engine.optimizer(torch.optim.AdamW, lr=1e-2)
paceline.load(folder, engine, optim)
for step in range(engine.step, STEPS):
    for number in engine.window(MICRO_BATCHES):  # this rank's share of the step's micro-batches
        x, y = batch(step, number)
        loss = nn.functional.mse_loss(model(x), y)
        engine.backward(loss)
    report = optim.step(max_norm=1.0)
    if mesh.is_main:
        print(f"step {step + 1}  loss {report.loss:.12f}  norm {report.grad_norm:.6f}")
paceline.save(folder, engine, optim, keep=1)
mesh.close()
