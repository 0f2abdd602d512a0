"""Bodies for parity, hashes, ledger and resharding; each runs on every rank."""

import hashlib

import torch
import torch.nn.functional as F

import paceline
from paceline.core.targets import IGNORE
from paceline.models import Decoder, DecoderConfig
from paceline.zero import Engine

CONFIG = dict(vocab_size=97, dim=32, layers=3, heads=4, kv_heads=2, ffn=80, context=16)
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, dict(lr=3e-3, weight_decay=0.1)),
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
}


def model(dropout=0.0, tied=True):
    return Decoder(DecoderConfig(**CONFIG, dropout=dropout, tied=tied), seed=1)


def batch(step, leaf):
    """Two rows with a different number of counted tokens in each micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    tokens = torch.randint(0, CONFIG["vocab_size"], (2, 13), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : (step + leaf) % 5] = IGNORE
    return tokens[:, :-1].contiguous(), targets


def reference(total, precision, name, steps=5, max_norm=1.0):
    """One process without the engine: losses, norms, and parameters (masters) after `steps`."""
    module = model()
    factory, options = OPTIMIZERS[name]
    masters = [p.detach().clone() for p in module.parameters()]
    optimizer = factory(masters, **options)
    if precision == "bf16":
        module.to(torch.bfloat16)
        module.cos_TE, module.sin_TE = model().cos_TE, model().sin_TE
    losses, norms = [], []
    for step in range(steps):
        sums = [torch.zeros_like(m) for m in masters]
        loss, count = 0.0, 0
        for leaf in range(total):
            tokens, targets = batch(step, leaf)
            module.zero_grad()
            value = module(tokens, targets)
            value.backward()
            loss, count = loss + float(value.detach()), count + int((targets != IGNORE).sum())
            for total_gradient, p in zip(sums, module.parameters(), strict=True):
                total_gradient += p.grad.float()
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient / count
        norms.append(float(torch.nn.utils.get_total_norm([m.grad for m in masters])))
        torch.nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        for p, master in zip(module.parameters(), masters, strict=True):
            p.data.copy_(master)
        losses.append(loss / count)
    return losses, norms, dict(zip([n for n, _ in module.named_parameters()], masters, strict=True))


def train(engine: Engine, optim, total, start, stop, max_norm=1.0):
    losses, norms = [], []
    for step in range(start, stop):
        for leaf in engine.window(total):
            tokens, targets = batch(step, leaf)
            engine.backward(engine.module(tokens, targets), float((targets != IGNORE).sum()))
        report = optim.step(max_norm=max_norm)
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms


def make(mesh, stage, precision, remat="none", name="adamw", dropout=0.0, shards=None, **more):
    engine = paceline.shard(
        model(dropout), mesh, stage=stage, precision=precision, remat=remat, shards=shards, seed=5, **more
    )
    factory, options = OPTIMIZERS[name]
    return engine, engine.optimizer(factory, **options)


def parity(mesh, accumulation, precision, name):
    """For every stage and remat: largest relative error of loss and norm over 5 steps, and of parameters."""
    total = accumulation * mesh.world
    losses, norms, masters = reference(total, precision, name)
    found = {}
    for stage in range(4):
        for remat in ("none", "full"):
            engine, optim = make(mesh, stage, precision, remat, name)
            ours = train(engine, optim, total, 0, 5)
            worst = [
                max(abs(a - b) / abs(b) for a, b in zip(x, y, strict=True))
                for x, y in zip(ours, (losses, norms), strict=True)
            ]
            values = max(float((engine.full(n) - m).abs().max()) for n, m in masters.items())
            found[stage, remat] = (*worst, values)
    return found


def digest(engine, losses):
    """SHA-256 over parameters, moments and losses, whoever holds them."""
    pieces = [
        (p.kind, p.name, p.start, p.tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for p in engine.pieces(owned=True)
    ]
    whole = sorted(piece for rank in engine.mesh.all_gather_object(pieces) for piece in rank)
    joined = {}
    for kind, name, _, data in whole:
        joined[kind, name] = joined.get((kind, name), b"") + data
    sha = hashlib.sha256(repr(losses).encode())
    for key in sorted(joined):
        sha.update(repr(key).encode() + joined[key])
    return sha.hexdigest()


def hashes(mesh, precision, total, steps, remats):
    """One hash for each (stage, remat), dropout and clipping on."""
    found = {}
    for stage in range(4):
        for remat in remats:
            engine, optim = make(mesh, stage, precision, remat, dropout=0.1)
            losses, _ = train(engine, optim, total, 0, steps, max_norm=0.5)
            found[stage, remat] = digest(engine, losses)
    return found


def hybrid_hash(mesh, precision, total, steps, stage, shards):
    engine, optim = make(mesh, stage, precision, dropout=0.1, shards=shards)
    losses, _ = train(engine, optim, total, 0, steps, max_norm=0.5)
    return digest(engine, losses)


def leg(mesh, root, precision, total, stage, start, stop):
    """A part of a run: loads what is in `root`, trains steps [start, stop), saves; losses of the whole run so far, hash."""
    engine, optim = make(mesh, stage, precision, dropout=0.1)
    extra = paceline.load(root, engine, optim)
    assert engine.step == start, (engine.step, start)
    losses = (extra or {"losses": []})["losses"] + train(engine, optim, total, start, stop, max_norm=0.5)[0]
    paceline.save(root, engine, optim, extra={"losses": losses})
    return digest(engine, losses)


def ledger(mesh, precision, total):
    """Measured minus planned, for each stage and optimizer, in bytes by category."""
    found = {}
    for stage in range(4):
        for name, moments in (("adamw", 2), ("sgd", 1)):
            engine, optim = make(mesh, stage, precision, name=name)
            train(engine, optim, total, 0, 2)
            gap = engine.memory() - engine.planned_memory(moments, total)
            found[stage, name] = {c: gap[c] for c in ("parameters", "gradients", "master", "moments")}
    return found


def elementwise(mesh, name):
    """Any elementwise torch optimizer: hash of three steps at stage 3 and at stage 0."""
    options = {"lr": 1e-3}
    out = []
    for stage in (0, 3):
        engine = paceline.shard(model(), mesh, stage=stage)
        optim = engine.optimizer(getattr(torch.optim, name), **options)
        losses, _ = train(engine, optim, 4, 0, 3)
        out.append(digest(engine, losses))
    return out


def frozen_round_trip(mesh, root, stage):
    """I26: one frozen and one trained layer, buffers and a tie come back bit-equal into a model of other values."""

    def build(seed):
        torch.manual_seed(seed)
        m = torch.nn.ModuleDict({"a": torch.nn.Linear(5, 5), "b": torch.nn.Linear(5, 5), "n": torch.nn.BatchNorm1d(5)})
        m["a"].requires_grad_(False)
        m.forward = lambda x: m["n"](m["b"](m["a"](x)))
        return m

    first = build(0)
    engine = paceline.shard(first, mesh, stage=stage)
    optim = engine.optimizer(torch.optim.Adam, lr=0.1)
    engine.backward(
        F.mse_loss(first(torch.ones(3, 5) * torch.arange(3.0)[:, None]), torch.zeros(3, 5), reduction="sum"), 15.0
    )
    optim.step()
    paceline.save(root, engine, optim)
    second = build(9)
    other = paceline.shard(second, mesh, stage=3 - stage)
    paceline.load(root, other, other.optimizer(torch.optim.Adam, lr=0.1))
    with engine.gathered(), other.gathered():
        pairs = [(v, second.state_dict()[k]) for k, v in first.state_dict().items()]
        return all(torch.equal(a, b) for a, b in pairs), len(pairs)
