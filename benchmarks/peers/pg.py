"""Process-group start and the shared training loop for the peers written straight on torch.distributed."""

import contextlib
import os

import torch
import torch.distributed as dist
from workload import CLIP


def start():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")


def train(a, m, model, opt, data, forward, no_sync=contextlib.nullcontext, set_sync=lambda last: None):
    """forward(x, y) -> loss; no_sync() wraps all but the last micro batch; set_sync(last) is called before each."""
    for s in m.steps():
        total = 0.0
        for k in range(a.accum):
            x, y = data(s, k)
            last = k == a.accum - 1
            set_sync(last)
            with contextlib.nullcontext() if last else no_sync():
                loss = forward(x, y)
                (loss / a.accum).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        opt.zero_grad(set_to_none=True)
        m.loss(total / a.accum)
