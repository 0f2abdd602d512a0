"""The harness itself: results by rank, a failure, a death and a hang on one rank, and that the next test is unharmed."""

import os
import threading

import pytest
import torch
from harness import RankFailed, ranks, run


def _sum(mesh, factor):
    return sum(mesh.all_gather_object((mesh.rank + 1) * factor))


def _pid_and_random(mesh):
    return os.getpid(), float(torch.rand(()))


def _raise_on_last(mesh):
    if mesh.rank == mesh.world - 1:
        raise ValueError("left leg")
    mesh.barrier()


def _die_on_last(mesh):
    if mesh.rank == mesh.world - 1:
        os._exit(17)
    mesh.barrier()


def _stuck_in_a_lock(mesh):
    lock = threading.Lock()
    lock.acquire()
    if mesh.rank == 0:
        lock.acquire()


def _warns(mesh):
    import warnings

    warnings.warn("this is on purpose", UserWarning, stacklevel=1)


@ranks(1, 2, 3)
def test_each_rank_answers(world: int) -> None:
    assert run(world, _sum, 10) == [10 * world * (world + 1) // 2] * world


@ranks(2)
def test_workers_are_kept_and_their_random_state_starts_anew(world: int) -> None:
    first, second = run(world, _pid_and_random), run(world, _pid_and_random)
    assert first == second and first[0][0] != first[1][0] and first[0][1] == first[1][1]


@ranks(2)
def test_an_exception_comes_back_with_rank_and_traceback(world: int) -> None:
    with pytest.raises(RankFailed, match="left leg") as failed:
        run(world, _raise_on_last)
    assert "ValueError" in failed.value.failures[1] and "_raise_on_last" in failed.value.failures[1]
    assert run(world, _sum, 1) == [3, 3]


@ranks(2)
def test_a_dead_rank_is_named_with_its_exit_code(world: int) -> None:
    with pytest.raises(RankFailed) as failed:
        run(world, _die_on_last)
    assert "exit 17" in failed.value.failures[1]


@ranks(2)
def test_a_hung_rank_is_found_and_its_stack_shown(world: int) -> None:
    run(world, _sum, 1)  # the workers are up: what follows measures the hang, not the start
    with pytest.raises(RankFailed) as failed:
        run(world, _stuck_in_a_lock, timeout=2)
    assert "hung: no answer in 2 s" in failed.value.failures[0] and "_stuck_in_a_lock" in failed.value.failures[0]
    assert run(world, _sum, 1) == [3, 3]


@ranks(1)
def test_a_warning_in_a_body_is_an_error(world: int) -> None:
    with pytest.raises(RankFailed, match="this is on purpose"):
        run(world, _warns)
