"""One SHA-256 over parameters, moments and losses, whatever the stage, the world, the remat, and the interruptions."""

import os

import numerics_bodies as bodies
import pytest
from harness import ranks, run

FULL = os.environ.get("PACELINE_MATRIX") == "full"
STEPS = 20
TOTAL = 12
_seen: dict[str, str] = {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(1, 2, 3, 4, *((5, 8) if FULL else ()))
def test_one_hash(world, precision):
    remats = ("none", "full") if FULL or world == 2 else ("none",)
    for results in run(world, bodies.hashes, precision, TOTAL, STEPS, remats):
        for key, value in results.items():
            assert value == _seen.setdefault(precision, value), (world, key)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_keeps_the_hash(stage, precision):
    """Two replicas of two shards."""
    alone = run(1, bodies.hybrid_hash, precision, TOTAL, 4, stage, 1)[0]
    assert set(run(4, bodies.hybrid_hash, precision, TOTAL, 4, stage, 2)) == {alone}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "legs", [((2, 3, 7), (2, 1, 20)), ((2, 3, 5), (3, 2, 11), (1, 0, 13), (4, 1, 20))], ids=["resume", "elastic"]
)
def test_I59_I64_interrupted_runs_keep_the_hash(tmp_path, legs, precision):
    """Each leg is (world, stage, until): loaded from the checkpoint of the last."""
    start = 0
    for world, stage, stop in legs:
        found = run(world, bodies.leg, str(tmp_path), precision, TOTAL, stage, start, stop)
        start = stop
    if precision not in _seen:
        _seen[precision] = run(1, bodies.hashes, precision, TOTAL, STEPS, ("none",))[0][0, "none"]
    assert set(found) == {_seen[precision]}


@ranks(1, 2)
def test_I26_frozen_weights_and_buffers_come_back(world, tmp_path):
    for stage in range(4):
        assert set(run(world, bodies.frozen_round_trip, str(tmp_path / str(stage)), stage)) == {(True, 9)}
