"""Bodies of the engine's multi-rank cases: each runs on every rank and returns what the test compares."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.core.errors import PacelineError


def reference_gradients(model, batches, loss):
    """One process, no engine: gradient of the mean over all micro-batches."""
    model.zero_grad()
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    return {n: (torch.zeros_like(p) if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}


def compare_sgd(mesh, build, batches_of, loss, *, stage, steps=3, precision="fp32", remat="none", **options):
    """Trains `build()` by SGD with and without the engine; the largest difference of any parameter, and names seen."""
    torch.manual_seed(0)
    plain = build()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.02)
    torch.manual_seed(0)
    model = build()
    engine = paceline.shard(model, mesh, stage=stage, precision=precision, remat=remat, **options)
    optim = engine.optimizer(torch.optim.SGD, lr=0.02)
    for step in range(steps):
        batches = [batches_of(step, i) for i in range(2 * mesh.world)]
        gradients = reference_gradients(plain, batches, loss)
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        for name, p in plain.named_parameters():
            p.grad = gradients[name] if p.requires_grad else None
        optimizer.step()
        for leaf in engine.window(len(batches)):
            engine.backward(loss(model, batches[leaf]), 1.0)
        report = optim.step()
        assert abs(report.grad_norm - float(norm)) < 1e-5 * max(1.0, float(norm)), (report.grad_norm, float(norm))
    worst = 0.0
    for name, p in plain.named_parameters():
        value = engine.full(name)
        assert value.shape == p.shape, (name, value.shape, p.shape)
        worst = max(worst, float((value.double() - p.detach().double()).abs().max()) if p.numel() else 0.0)
    return worst


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Tied, frozen, unused, reused, tiny, 0-dim, zero-size, mixed-dtype and non-contiguous parameters in one model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(2))
        self.tiny = nn.Parameter(torch.ones(1, 3))
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(8, 8).bfloat16(), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.layers[1].up.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        x = x + self.frozen(x) + (x @ self.turned.t()) @ self.turned + x @ self.narrow.float()
        x = x * self.scale * self.wide.float() + self.nothing.sum() + self.tiny.sum()
        return self.head(torch.tanh(x) / 4)


def tokens_of(step, i):
    generator = torch.Generator().manual_seed(100 * step + i)
    return torch.randint(0, 11, (2, 5), generator=generator)


def token_loss(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten().roll(1))


def odd_parameters(mesh, stage, remat):
    return compare_sgd(mesh, Odd, tokens_of, token_loss, stage=stage, remat=remat)


def token_divisor(mesh, stage):
    """I01: per-token loss (w x)^2 / ... whose gradient at w = 1 is 2 x^2 a token; unequal token counts per micro-batch."""
    rows = [[[1.0, 2.0, 3.0], [4.0]], [[1.0, 1.0], [2.0] * 6]]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = paceline.shard(model, mesh, stage=stage)
    optim = engine.optimizer(torch.optim.SGD, lr=1.0)
    mine = rows[mesh.rank] if mesh.world == 2 else rows[0] + rows[1]
    for row in engine.accumulate(mine):
        x = torch.tensor(row).unsqueeze(1)
        engine.backward(model(x).square().sum(), len(row))
    report = optim.step()
    return 1.0 - float(engine.full("weight")), report.grad_norm, report.loss


def norm_ratio(mesh, stage, accumulation):
    """I02: the engine's norm over the plain one, for a model that divides by its own token count."""
    torch.manual_seed(1)
    plain = Layer()
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(accumulation * mesh.world)]
    gradients = reference_gradients(plain, batches, lambda m, x: m(x).square().mean())
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    torch.manual_seed(1)
    engine = paceline.shard(model := Layer(), mesh, stage=stage)
    optim = engine.optimizer(torch.optim.SGD, lr=0.0)
    mine = [batches[i * mesh.world + mesh.rank] for i in range(accumulation)]
    for x in mine:
        model(x).square().mean().backward()
    plain_loop = optim.step().grad_norm
    for x in engine.accumulate(mine):
        model(x).square().mean().backward()
    return plain_loop / norm, optim.step().grad_norm / norm


def unit_norm(mesh, stage):
    """I12: a 4x4 weight whose gradients are all 1 has norm 4 on each rank."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    engine = paceline.shard(model, mesh, stage=stage)
    optim = engine.optimizer(torch.optim.SGD, lr=0.0)
    model(torch.ones(1, 4)).sum().backward()
    return optim.step(max_norm=1.0).grad_norm


def master_weight(mesh, stage, loaded):
    """I18: 1.0 after 100 updates of 1e-4 in bf16, also of a model loaded in bf16; and the dtypes that the engine prints."""
    model = nn.Linear(1, 1, bias=False).to(getattr(torch, loaded))
    nn.init.ones_(model.weight)
    engine = paceline.shard(model, mesh, stage=stage, precision="bf16")
    optim = engine.optimizer(torch.optim.SGD, lr=1e-4)
    for _ in range(100):
        model(torch.ones(1, 1)).sum().backward()
        optim.step()
    return float(engine.full("weight")), engine.describe()


def bf16_accumulation(mesh, stage):
    """I20: 1,000 gradients of 0.01 (as bf16 holds it) add up in f32."""
    model = nn.Linear(1, 1, bias=False)
    engine = paceline.shard(model, mesh, stage=stage, precision="bf16")
    optim = engine.optimizer(torch.optim.SGD, lr=1.0)
    before = float(engine.full("weight"))
    count = 1000 // mesh.world
    for x in engine.accumulate([torch.full((1, 1), 0.01)] * count):
        engine.backward(model(x).sum(), 1e-3 * 1000 / (count * mesh.world))
    optim.step()
    return before - float(engine.full("weight"))


class Narrow(nn.Module):
    """A frozen bf16 weight under f32 arithmetic: rounding activations to bf16 would amplify the last bit of an update."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).bfloat16() / 4, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.float())


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = Narrow(8)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def floats_of(step, i):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * step + i))


def square_loss(model, x):
    return model(x).square().mean()


def adapters(mesh, stage):
    """I21, I22, I29: a frozen bf16 base with f32 adapters in one unit; I27: nothing is kept for the frozen part."""
    worst = compare_sgd(mesh, Adapted, floats_of, square_loss, stage=stage)
    engine = paceline.shard(Adapted(), mesh, stage=stage)
    optim = engine.optimizer(torch.optim.AdamW, lr=0.1)
    engine.module(floats_of(0, 0)).square().mean().backward()
    optim.step()
    states = {piece.name for piece in engine.pieces(owned=False) if piece.kind == "exp_avg"}
    frozen = [p for p in engine.pieces(owned=False) if p.kind == "master" and "base" in p.name]
    return worst, sorted(states), len(frozen), engine.describe()


class Choice(nn.Module):
    """I30: one of four layers of equal shape, chosen by the data: further apart than a prefetch reaches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, which):
        return self.layers[which](x)


def data_dependent_branch(mesh, stage):
    def loss(model, batch):
        x, which = batch
        return model(x, which).sum()

    def batches(step, i):
        return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + i)), (step + 3 * i) % 4

    return compare_sgd(mesh, Choice, batches, loss, stage=stage)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, used):
        return sum(self.experts[i](x) for i in used)


class Mixture(nn.Module):
    """I31: experts inside blocks, so that an expert is a part of a unit; a rank may leave some without a token."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x, used):
        for layer in self.layers:
            x = x + layer(x, used)
        return x


def idle_experts(mesh, stage):
    def loss(model, batch):
        return model(*batch).square().mean()

    def batches(step, i):
        return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + i)), ((0, 1), (2, 3))[i % 2]

    return max(compare_sgd(mesh, build, batches, loss, stage=stage) for build in (Mixture, Experts))


class Recomputed(nn.Module):
    """I33, I40: the user's own checkpointing, reentrant or not, over reused and partly frozen layers."""

    def __init__(self, reentrant, reuse):
        super().__init__()
        self.reentrant, self.reuse = reentrant, reuse
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.layers[1].up.requires_grad_(False)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in (*self.layers, *([self.layers[0]] if self.reuse else [])):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def user_checkpointing(mesh, stage, reentrant, reuse):
    return compare_sgd(mesh, lambda: Recomputed(reentrant, reuse), floats_of, square_loss, stage=stage)


def small_parameters(mesh):
    """I35: fewer elements than ranks or blocks; norm sqrt(3) of a 1x3 weight; Adam moves every element by lr."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = paceline.shard(model, mesh, stage=3)
    optim = engine.optimizer(torch.optim.Adam, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    norm = optim.step().grad_norm
    five = nn.Linear(2, 5, bias=False)
    whole = five.weight.detach().clone()
    five.load_state_dict({"weight": mesh.broadcast_object(whole)})
    other = paceline.shard(five, mesh, stage=3)
    return (
        norm,
        engine.full("weight").tolist(),
        other.full("weight").shape,
        bool((other.full("weight") == mesh.broadcast_object(whole)).all()),
    )


class Borrower(nn.Module):
    """I38: a weight that is read outside the module that owns it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.layers[0](x) @ self.layers[1].weight


def read_outside(mesh):
    torch.manual_seed(0)
    model = Borrower()
    whole = {k: v.clone() for k, v in model.state_dict().items()}
    engine = paceline.shard(model, mesh, stage=3)
    said = []
    for attempt in (lambda: model(torch.ones(1, 4)), lambda: model.layers[1].weight + 1, model.state_dict):
        try:
            attempt()
            said.append("no error")
        except PacelineError as error:
            said.append(str(error))
    engine._passes._drop_arrived()
    with engine.gathered():
        equal = all(bool((v == whole[k]).all()) for k, v in model.state_dict().items())
    shapes = sum(p.numel() for p in model.parameters()), [tuple(p.shape) for p in model.parameters()]
    return said, equal, shapes


def uneven_batches(mesh, stage):
    """I65: three micro-batches on rank 0, two on the others; equal to one process over the same five."""
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer())
    counts = [3] + [2] * (mesh.world - 1)
    batches = [floats_of(rank, i) for rank in range(mesh.world) for i in range(counts[rank])]
    gradients = reference_gradients(plain, batches, square_loss)
    torch.manual_seed(0)
    engine = paceline.shard(model := nn.Sequential(Layer(), Layer()), mesh, stage=stage, units=[Layer])
    optim = engine.optimizer(torch.optim.SGD, lr=1.0)
    before = {n: engine.full(n) for n, _ in model.named_parameters()}
    for x in engine.accumulate([floats_of(mesh.rank, i) for i in range(counts[mesh.rank])]):
        engine.backward(square_loss(model, x), 1.0)
    report = optim.step()
    worst = max(float((before[n] - engine.full(n) - gradients[n]).abs().max()) for n in before)
    return worst, report.micro_batches


def short_window(mesh, stage):
    """I08, I09: ten micro-batches in windows of four: three steps, the last divides by its own two."""
    torch.manual_seed(0)
    engine = paceline.shard(model := Layer(), mesh, stage=stage)
    optim = engine.optimizer(torch.optim.SGD, lr=0.0)
    batches = [floats_of(9, i) for i in range(10)]
    reports = []
    for start in range(0, 10, 4):
        for leaf in engine.window(len(batches[start : start + 4])):
            engine.backward(square_loss(model, batches[start + leaf]), 1.0)
        reports.append(optim.step())
    torch.manual_seed(0)
    plain = Layer()
    gradients = reference_gradients(plain, batches[8:], square_loss)
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    return [r.micro_batches for r in reports], engine.step, reports[-1].grad_norm / norm
