"""The one workload every peer trains: a Llama-style decoder, learnable Markov tokens, one meter.

Parameter names equal Hugging Face's LlamaForCausalLM, so the HF peers start from the same weights.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SIZES = {  # vocab, dim, layers, heads, ffn, tied
    "tiny": dict(vocab=8192, dim=256, layers=8, heads=8, ffn=688, tied=False),  # 10.5M parameters
    "small": dict(vocab=32000, dim=768, layers=12, heads=12, ffn=2048, tied=True),  # 109.5M
}
OPT = dict(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
EPS, THETA, CLIP = 1e-5, 10000.0, 1.0


def arguments(**more):
    p = argparse.ArgumentParser()
    p.add_argument("--size", default="tiny", choices=SIZES)
    p.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    p.add_argument("--stage", type=int, default=0)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--micro", type=int, default=4)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--virtual-world", type=int, default=0, help="single: train the whole batch of this many ranks")
    p.add_argument("--label", default="")
    p.add_argument("--profile", default="", help="write a torch.profiler table of the last step here")
    for name, default in more.items():
        p.add_argument("--" + name, type=type(default), default=default)
    a = p.parse_args()
    a.rank, a.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    return a


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.d = c["heads"], c["dim"] // c["heads"]
        for n in "qkvo":
            setattr(self, n + "_proj", nn.Linear(c["dim"], c["dim"], bias=False))

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, self.h, self.d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))

        def rot(z):
            return z * cos + torch.cat((-z[..., self.d // 2 :], z[..., : self.d // 2]), -1) * sin

        o = F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["dim"], c["ffn"], bias=False)
        self.up_proj = nn.Linear(c["dim"], c["ffn"], bias=False)
        self.down_proj = nn.Linear(c["ffn"], c["dim"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c["dim"]), RMSNorm(c["dim"])

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab"], c["dim"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.norm = RMSNorm(c["dim"])


class Llama(nn.Module):
    """forward(tokens, targets) -> mean next-token cross entropy (fp32)."""

    def __init__(self, c, seq):
        super().__init__()
        self.model, self.lm_head = Body(c), nn.Linear(c["dim"], c["vocab"], bias=False)
        d = c["dim"] // c["heads"]
        ang = torch.outer(torch.arange(seq).float(), THETA ** (-torch.arange(0, d, 2).float() / d))
        self.register_buffer("cos", torch.cat((ang, ang), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((ang, ang), -1).sin(), persistent=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
        if c["tied"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x, y):
        h = self.model.embed_tokens(x)
        cos, sin = self.cos[: x.shape[1]].to(h.dtype), self.sin[: x.shape[1]].to(h.dtype)
        for layer in self.model.layers:
            h = layer(h, cos, sin)
        logits = self.lm_head(self.model.norm(h))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.reshape(-1))


def build(a):
    torch.manual_seed(1234)
    return Llama(SIZES[a.size], a.seq)


def autocast(a):
    return torch.autocast("cpu", torch.bfloat16, enabled=a.dtype == "bf16")


class Batches:
    """Markov chain: every token has 8 fixed successors (entropy floor 1.66 nats). Sequence i is the same everywhere."""

    P = np.array([0.4, 0.2, 0.12, 0.1, 0.08, 0.05, 0.03, 0.02])

    def __init__(self, a):
        self.a, vocab = a, SIZES[a.size]["vocab"]
        self.world = a.virtual_world or a.world
        used = min(vocab, 2048)  # the chain lives on 2048 tokens, so it is learnable quickly
        succ = np.random.default_rng(7).integers(0, used, (used, 8))
        n = a.steps * a.accum * self.world * a.micro  # separate generators: --steps does not change the first sequences
        t = np.empty((n, a.seq + 1), np.int64)
        t[:, 0] = np.random.default_rng(8).integers(0, used, n)
        pick = np.random.default_rng(9).choice(8, (n, a.seq), p=self.P)
        for j in range(a.seq):
            t[:, j + 1] = succ[t[:, j], pick[:, j]]
        self.t = torch.from_numpy(t)

    def index(self, step, k):
        """First sequence of micro batch k of this step on this rank."""
        a = self.a
        if a.virtual_world:  # one process walks over all ranks' micro batches
            return (step * a.accum * self.world + k) * a.micro
        return ((step * a.accum + k) * self.world + a.rank) * a.micro

    def __call__(self, step, k):
        i = self.index(step, k)
        rows = self.t[i : i + self.a.micro]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def rss(key="VmRSS"):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024


class Meter:
    """Times whole steps, keeps losses, prints one JSON line on rank 0. Make it after the imports, before the model."""

    def __init__(self, a, peer):
        gc.collect()
        self.a, self.peer, self.ms, self.cpu, self.losses, self.base = a, peer, [], [], [], rss()
        self.faults, self.high, self.t0 = 0, 0, time.perf_counter()

    def steps(self):
        a, prof = self.a, None
        self.ready = time.perf_counter() - self.t0
        for s in range(a.steps):
            if s == a.warmup:
                self.high = rss("VmHWM")
                with contextlib.suppress(OSError):
                    Path("/proc/self/clear_refs").write_text("5")  # restart VmHWM: the steady-state peak
                self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            if a.profile and s == a.steps - 1:
                prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                prof.__enter__()
            t, c = time.perf_counter(), time.process_time()
            yield s
            self.ms.append((time.perf_counter() - t) * 1e3)
            self.cpu.append((time.process_time() - c) * 1e3)
        if prof:
            prof.__exit__(None, None, None)
            with open(f"{a.profile}.rank{a.rank}.txt", "w") as f:
                f.write(
                    f"step {self.ms[-1]:.1f} ms\n"
                    + prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=70)
                )
            if a.rank == 0:
                prof.export_chrome_trace(a.profile + ".trace.json")

    def loss(self, value):
        self.losses.append(value)

    def report(self, **more):
        import torch.distributed as dist

        a, n = self.a, self.a.warmup
        u = resource.getrusage(resource.RUSAGE_SELF)
        mem = [u.ru_maxrss / 1024, max(self.high, rss("VmHWM")), rss("VmHWM"), self.base]
        loss = torch.tensor([float(x) for x in self.losses], dtype=torch.float64)
        mems = [mem]
        if dist.is_initialized() and dist.get_world_size() > 1:
            mems = [None] * a.world
            dist.all_gather_object(mems, mem)
            dist.all_reduce(loss)
            loss /= a.world
        if a.rank:
            return
        step = statistics.median(self.ms[n:])
        tokens = a.micro * a.accum * a.seq * (a.virtual_world or a.world)
        if not all(map(math.isfinite, loss.tolist())):
            more["bad"] = "non-finite loss"
        print(
            "JSON "
            + json.dumps(
                dict(
                    peer=a.label or self.peer,
                    stage=a.stage,
                    world_size=a.world,
                    size=a.size,
                    dtype=a.dtype,
                    accum=a.accum,
                    tokens_per_s=round(1e3 * tokens / step, 1),
                    step_ms=round(step, 1),
                    step_ms_min=round(min(self.ms[n:]), 1),
                    cpu_ms=round(statistics.median(self.cpu[n:]), 1),
                    init_s=round(self.ready, 2),
                    maxrss_mb=[round(m[0]) for m in mems],
                    peak_rss_mb=[round(m[1]) for m in mems],
                    steady_peak_mb=[round(m[2]) for m in mems],
                    import_mb=[round(m[3]) for m in mems],
                    delta_mb=[round(m[1] - m[3]) for m in mems],
                    steady_delta_mb=[round(m[2] - m[3]) for m in mems],
                    minor_faults_per_step=round((u.ru_minflt - self.faults) / max(1, a.steps - n)),
                    final_loss=round(loss[-1].item(), 6),
                    losses=[round(x, 6) for x in loss.tolist()],
                    **more,
                )
            ),
            flush=True,
        )
