"""What every peer trains: a Llama-style decoder in plain torch, on learnable Markov tokens."""

import argparse
import os

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
    p.add_argument("--trace", default="", help="write a Chrome trace of rank 0's last step here")
    p.add_argument("--heap", type=int, default=0, help="1: sample the live heap (slows the step a little)")
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
