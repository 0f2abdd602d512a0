"""More bodies of the engine's cases: what it refuses, and what it leaves alone."""

import torch
from engine_cases import Layer, floats_of
from torch import nn

import paceline
from paceline.core.errors import PacelineError


def different_models(mesh):
    torch.manual_seed(mesh.rank)
    try:
        paceline.shard(Layer(), mesh, stage=3)
    except PacelineError as error:
        return str(error)
    return "no error"


def shared_stream(mesh, stage):
    """The caller's own random stream is as if the engine were not there; dropout masks belong to the micro-batch."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    engine = paceline.shard(model, mesh, stage=stage, remat="full")
    optim = engine.optimizer(torch.optim.SGD, lr=0.0)
    torch.manual_seed(7)
    for _ in range(2):
        for _leaf in engine.window(mesh.world):
            engine.backward(model(torch.ones(2, 4)).sum(), 1.0)
        optim.step()
    return bool((torch.rand(3) == expected).all())


def evaluation_between_steps(mesh, stage):
    """Parameters after three steps with dropout, without and with evaluations in between."""
    ends = []
    for evaluate in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(2))}
        )
        model.forward = lambda x, m=model: m["layers"][1](m["layers"][0](x))
        engine = paceline.shard(model, mesh, stage=stage)
        optim = engine.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            for leaf in engine.window(2 * mesh.world):
                engine.backward(model(floats_of(step, leaf)).square().sum(), 24.0)
            optim.step()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    model(floats_of(0, 0))
                model.train()
        ends.append([engine.full(name).tolist() for name, _ in model.named_parameters()])
    return ends


def said_by(attempt):
    try:
        attempt()
    except PacelineError as error:
        return str(error)
    return "no error"


def wrong_use(mesh):
    said = []
    torch.manual_seed(0)
    engine = paceline.shard(model := nn.Linear(2, 2), mesh, stage=2)
    optim = engine.optimizer(torch.optim.SGD, lr=0.1)
    said.append(said_by(optim.step))
    model(torch.ones(1, 2)).sum().backward()
    said.append(said_by(lambda: list(engine.window(2))))
    optim.step()
    said.append(said_by(lambda: engine.backward(torch.ones((), requires_grad=True), 1.0)))
    engine.backward(model(torch.ones(1, 2)).sum(), 0.0)
    said.append(said_by(optim.step))
    torch.manual_seed(0)
    other = paceline.shard(nn.Linear(2, 2), mesh, stage=2)
    said.append(said_by(lambda: other.optimizer(torch.optim.Adafactor, lr=0.1)))
    return said


def different_reuse(mesh):
    """Ranks use different blocks of equal shape a second time: the gathers pair up, each rank with the other's block."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    engine = paceline.shard(model, mesh, stage=3)
    optim = engine.optimizer(torch.optim.SGD, lr=0.1)
    before = engine.full("layers.0.weight")
    path = [0, 1, 2]

    def forward(x):
        for i in path:
            x = model["layers"][i](x)
        return x

    model.forward = forward
    with torch.no_grad():
        path.append(mesh.rank)
        model(torch.ones(1, 4))
        path.pop()
    engine.backward(model(torch.ones(1, 4)).sum(), 1.0)
    said = said_by(optim.step)
    return said, bool((engine.full("layers.0.weight") == before).all())


def not_finite(mesh):
    torch.manual_seed(0)
    engine = paceline.shard(model := Layer(), mesh, stage=2)
    optim = engine.optimizer(torch.optim.SGD, lr=0.1)
    before = engine.full("up.weight")
    engine.backward(model(torch.ones(1, 8)).sum() * float("inf"), 1.0)
    said = said_by(optim.step)
    return said, bool((engine.full("up.weight") == before).all())


def surplus_backward(mesh, stage):
    """The window's micro-batches, and one more: its gradient must not be dropped without a word."""
    torch.manual_seed(0)
    engine = paceline.shard(model := nn.Linear(2, 2), mesh, stage=stage)
    for _leaf in engine.window(2 * mesh.world):
        engine.backward(model(torch.ones(1, 2)).sum(), 1.0)
    return said_by(lambda: engine.backward(model(torch.ones(1, 2)).sum(), 1.0))
