"""I59: a checkpoint of any stage and world size loads into any other, bit for bit.

The model is small but has all that can go wrong: frozen weights between trained ones, tied ends, buffers, parameters that
lie across the boundary of two shards.
"""

import hashlib
from pathlib import Path

import torch
from checkpoint_models import make, state, train
from harness import run

import paceline
from paceline.mesh.mesh import Mesh
from paceline.zero import Engine

WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
TOTAL = 5  # micro-batches a step: uneven at every world size but 1


def digest(engine: Engine) -> str:
    """SHA-256 over masters, frozen values, moments and buffers."""
    sha = hashlib.sha256()
    for key, tensor in sorted(state(engine).items()):
        sha.update(repr((key, tensor.shape, tensor.dtype)).encode())
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def save_all(mesh: Mesh, root: Path) -> list[tuple[str, list[float]]]:
    found = []
    for stage in STAGES:
        engine, optim = make(mesh, stage)
        train(engine, optim, 2, TOTAL)
        engine.module.seen.fill_(7)  # how many forwards a rank made depends on the world
        paceline.save(root / f"world{mesh.world}-stage{stage}", engine, optim)
        found.append((digest(engine), train(engine, optim, 1, TOTAL)))
    return found


def load_all(mesh: Mesh, root: Path) -> list[tuple[str, list[float]]]:
    found = []
    for stage in STAGES:
        engine, optim = make(mesh, stage, seed=9)  # other weights, so that nothing is right before it is loaded
        for source in sorted(root.iterdir()):
            paceline.load(source, engine, optim)
            found.append((digest(engine), train(engine, optim, 1, TOTAL)))
    return found


def test_any_stage_and_world_loads_any_other(tmp_path: Path) -> None:
    wrote = [result for world in WORLDS for rank in run(world, save_all, tmp_path) for result in rank]
    assert len({state for state, _ in wrote}) == 1
    next_losses = {tuple(losses) for _, losses in wrote}
    assert len(next_losses) == 1
    assert len(list(tmp_path.iterdir())) == 16
    for world in WORLDS:
        for rank in run(world, load_all, tmp_path, timeout=120):
            assert len(rank) == 64
            assert {state for state, _ in rank} == {wrote[0][0]}
            assert {tuple(losses) for _, losses in rank} == next_losses
