"""A small model with everything that a checkpoint must hold, and engines over it on one rank."""

from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.mesh.mesh import Mesh
from paceline.zero import Engine


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.trained = nn.Linear(dim, dim)

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.trained(torch.tanh(self.frozen(self.norm(x_ND))))


class Mixed(nn.Module):
    """Trained and frozen parameters, tied ends, buffers that are saved and one that is not."""

    def __init__(self, seed: int = 0, dim: int = 150, vocabulary: int = 67) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocabulary, dim)
            self.layers = nn.ModuleList(Block(dim) for _ in range(3))
            self.head = nn.Linear(dim, vocabulary, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.rand(dim) + 0.5)
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens_N: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x_ND = self.embed(tokens_N) * self.scale
        for layer in self.layers:
            x_ND = layer(x_ND)
        return self.head(x_ND)


def one_rank() -> Mesh:
    return Mesh(rank=0, world=1, local_rank=0, local_world=1, device=torch.device("cpu"))


def make(mesh: Mesh, stage: int, seed: int = 0, shards: int | None = None, **model: Any) -> tuple[Engine, Any]:
    engine = paceline.shard(Mixed(seed, **model), mesh, stage=stage, shards=shards)
    return engine, engine.optimizer(torch.optim.AdamW, lr=1e-2)


def train(engine: Engine, optim: Any, steps: int, total: int = 2) -> list[float]:
    """Losses of some steps; each micro-batch depends on its step and number alone."""
    losses = []
    for _ in range(steps):
        for leaf in engine.window(total):
            generator = torch.Generator().manual_seed(1000 * engine.step + leaf)
            tokens_N = torch.randint(0, 67, (12,), generator=generator)
            loss = nn.functional.cross_entropy(engine.module(tokens_N), tokens_N.roll(1), reduction="sum")
            engine.backward(loss, 12)
        losses.append(optim.step(max_norm=1.0).loss)
    return losses


def state(engine: Engine) -> dict[tuple[str, str], Tensor]:
    """Every tensor of the run, whole, on every rank."""
    own = [(p.kind, p.name, p.shape, p.start, p.tensor.clone()) for p in engine.pieces(owned=True)]
    parts: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for pieces in engine.mesh.all_gather_object(own):
        for kind, name, shape, start, tensor in pieces:
            parts.setdefault((kind, name), []).append((start, tensor))
            shapes[kind, name] = shape
    return {k: torch.cat([t for _, t in sorted(v, key=lambda p: p[0])]).view(shapes[k]) for k, v in parts.items()}


def different(one: dict[tuple[str, str], Tensor], other: dict[tuple[str, str], Tensor]) -> list[tuple[str, str]]:
    """Names of tensors that are not equal to the bit."""
    return [k for k in one.keys() | other.keys() if k not in one or k not in other or not torch.equal(one[k], other[k])]
