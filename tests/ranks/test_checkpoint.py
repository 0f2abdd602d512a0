"""A failure on one rank ends as the same error on all of them, at once, and harms no earlier checkpoint."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_models import different, make, state, train
from harness import ranks, run

import paceline
from paceline.checkpoint import list_checkpoints, verify, writer
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Reader
from paceline.core.errors import PacelineError
from paceline.mesh.mesh import Mesh


def said(action: Any, *args: Any) -> str:
    with pytest.raises(PacelineError) as caught:
        action(*args)
    return f"{type(caught.value).__name__}: {caught.value}"


def save_with_a_full_disk(mesh: Mesh, root: Path, bad: int) -> str:
    engine, optim = make(mesh, 2)
    paceline.save(root, engine, optim)
    train(engine, optim, 1)
    write_all = writer._write_all

    def full(file: Any, data: memoryview) -> None:
        write_all(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if mesh.rank == bad:
        writer._write_all = full
    try:
        return said(paceline.save, root, engine, optim)
    finally:
        writer._write_all = write_all


@pytest.mark.parametrize("bad", [0, 2])
def test_a_full_disk_on_one_rank(bad: int, tmp_path: Path) -> None:
    answers = run(3, save_with_a_full_disk, tmp_path, bad)
    assert len(set(answers)) == 1
    assert answers[0].startswith("RunFailed: the checkpoint of step 1")
    file = rf"rank-{bad:05d}.safetensors: No space left on device"
    assert f"rank {bad}, {tmp_path}/.step-00000001.tmp-" in answers[0] and file in answers[0]
    assert os.listdir(tmp_path) == ["step-00000000"]
    verify(tmp_path / "step-00000000")


def save_with_a_bug(mesh: Mesh, root: Path, bad: int) -> str:
    engine, optim = make(mesh, 3)
    if mesh.rank == bad:
        engine.pieces = lambda owned=True: 1 / 0
    return said(paceline.save, root, engine, optim)


@ranks(2)
def test_any_exception_on_one_rank(world: int, tmp_path: Path) -> None:
    for bad in range(world):
        answers = run(world, save_with_a_bug, tmp_path, bad)
        assert len(set(answers)) == 1 and f"rank {bad}" in answers[0] and "ZeroDivisionError" in answers[0]
    assert os.listdir(tmp_path) == []


def save_where_a_file_is(mesh: Mesh, root: Path) -> str:
    engine, optim = make(mesh, 0)
    return said(paceline.save, root, engine, optim)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    answers = run(2, save_where_a_file_is, tmp_path / "run")
    assert len(set(answers)) == 1 and "rank 0" in answers[0] and "File exists" in answers[0]


def save_two(mesh: Mesh, root: Path) -> None:
    engine, optim = make(mesh, 3)
    for _ in range(2):
        train(engine, optim, 1)
        paceline.save(root, engine, optim, extra={"at": engine.step})


def load_bad(mesh: Mesh, root: Path) -> list[str]:
    engine, optim = make(mesh, 3, seed=9)
    return [said(paceline.load, root / "step-00000002", engine, optim)]


def load_root(mesh: Mesh, root: Path) -> tuple[Any, int, list[str]]:
    engine, optim = make(mesh, 1, seed=9)
    if mesh.is_main:
        with pytest.warns(UserWarning, match="going on from") as caught:
            extra = paceline.load(root, engine, optim)
        return extra, engine.step, [str(w.message) for w in caught]
    return paceline.load(root, engine, optim), engine.step, []


def test_a_damaged_file_and_a_missing_tensor(tmp_path: Path) -> None:
    run(3, save_two, tmp_path)
    folder = list_checkpoints(tmp_path)[-1]
    file = folder / "rank-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    for answer in run(2, load_bad, tmp_path):
        assert answer[0].startswith("InputError") and "rank-00002.safetensors" in answer[0]
    results = run(2, load_root, tmp_path)
    assert [r[:2] for r in results] == [({"at": 1}, 1)] * 2 and "rank-00002" in results[0][2][0]
    file.write_bytes(whole)
    about = Manifest.read(folder)
    # The last piece of one tensor: at stage 3 only one of the two ranks needs it.
    gone = max(
        (e for e in about.entries if e.name == "layers.2.trained.weight" and e.kind == "exp_avg"), key=lambda e: e.start
    )
    about.entries.remove(gone)
    (folder / "manifest.json").write_bytes(about.data())
    answers = run(2, load_bad, tmp_path)
    assert answers[0] == answers[1] and "exp_avg 'layers.2.trained.weight'" in answers[0][0]


def read_bytes(mesh: Mesh, root: Path) -> tuple[int, int]:
    """Bytes that a rank reads at stage 3, and that its pieces have."""
    engine, optim = make(mesh, 3, seed=9)
    count = 0
    read = Reader._read

    def counting(self: Reader, entry: Any, start: int, out: Any) -> None:
        nonlocal count
        count += out.nbytes
        read(self, entry, start, out)

    Reader._read = counting
    try:
        paceline.load(root, engine, optim)
    finally:
        Reader._read = read
    return count, sum(p.tensor.nbytes for p in engine.pieces(owned=False))


def test_a_rank_reads_what_it_needs(tmp_path: Path) -> None:
    run(1, save_two, tmp_path)
    for read, needed in run(4, read_bytes, tmp_path):
        assert read == needed


def hybrid(mesh: Mesh, root: Path) -> tuple[list[tuple[str, str]], int]:
    engine, optim = make(mesh, 2, shards=2)
    train(engine, optim, 1, total=4)
    engine.module.seen.fill_(7)
    paceline.save(root, engine, optim)
    other, other_optim = make(mesh, 3, seed=9, shards=4)
    paceline.load(root, other, other_optim)
    return different(state(engine), state(other)), len(list((root / "step-00000001").glob("rank-*")))


def test_replicas_write_once(tmp_path: Path) -> None:
    """Two replicas of two shards: the first replica's ranks write."""
    assert run(4, hybrid, tmp_path) == [([], 2)] * 4
