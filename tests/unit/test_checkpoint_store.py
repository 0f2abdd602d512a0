"""A checkpoint is whole or not there, and what is damaged is found."""

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import Mixed, different, make, one_rank, state, train
from safetensors.torch import load_file

import paceline
from paceline.checkpoint import list_checkpoints, manifest, newest, save, store, verify, writer
from paceline.cli.main import main
from paceline.core.errors import InputError, RunFailed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of step 2; not to be changed."""
    root = tmp_path_factory.mktemp("run")
    engine, optim = make(one_rank(), 2)
    train(engine, optim, 2)
    paceline.save(root, engine, optim, extra={"note": ["x", 1]})
    return root


def copy_of(saved: Path, to: Path) -> Path:
    return Path(shutil.copytree(saved, to / "copy"))


@pytest.mark.parametrize("stage", range(4))
def test_round_trip(stage: int, tmp_path: Path) -> None:
    engine, optim = make(one_rank(), stage)
    optim.param_groups[0]["lr"] = 3e-3
    train(engine, optim, 3)
    before = state(engine)
    path = paceline.save(tmp_path, engine, optim, extra={"tokens": 7})
    assert path == tmp_path / "step-00000003" == newest(tmp_path)
    assert {kind for kind, _ in before} == {"master", "param", "buffer", "exp_avg", "exp_avg_sq"}
    assert (
        ("buffer", "seen") in before and ("buffer", "scratch") not in before and ("master", "head.weight") not in before
    )
    other, other_optim = make(one_rank(), 3 - stage, seed=9)
    train(other, other_optim, 1)
    assert paceline.load(tmp_path, other, other_optim) == {"tokens": 7}
    assert other.step == 3 and other_optim.param_groups[0]["lr"] == 3e-3
    assert not different(before, state(other))
    assert train(other, other_optim, 2) == train(engine, optim, 2)


def test_frozen_weights_and_buffers_reach_the_module(saved: Path) -> None:
    engine, _ = make(one_rank(), 3, seed=9)
    paceline.load(saved, engine)
    with engine.gathered():
        frozen = dict(engine.module.named_parameters())["layers.1.frozen.weight"].clone()
    assert torch.equal(frozen, Mixed(0).layers[1].frozen.weight)
    assert int(engine.module.seen) == 4


def test_files_are_plain(saved: Path) -> None:
    folder = saved / "step-00000002"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    about = json.loads((folder / "manifest.json").read_text())
    assert about["extra"] == {"note": ["x", 1]} and about["scalars"]["ties"] == {"head.weight": "embed.weight"}
    assert "exp_avg:layers.0.trained.weight[0:22500]" in load_file(folder / "rank-00000.safetensors")


def test_every_flipped_bit_is_found(saved: Path, tmp_path: Path) -> None:
    root = copy_of(saved, tmp_path)
    folder = root / "step-00000002"
    engine, _ = make(one_rank(), 0)
    chance = random.Random(5)
    files = sorted(folder.iterdir())
    for i in range(60):
        file = files[i % 2]
        whole = file.read_bytes()
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(InputError, match=r"damaged.*step-00000002"):
            verify(folder)
        with pytest.raises(InputError, match="damaged"):
            paceline.load(folder, engine)
        file.write_bytes(whole)
    verify(folder)


def test_each_bit_of_the_manifests_first_line(saved: Path, tmp_path: Path) -> None:
    file = copy_of(saved, tmp_path) / "step-00000002" / "manifest.json"
    whole = file.read_bytes()
    for at in range(whole.index(b"\n") + 1):
        for bit in range(8):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(InputError, match="damaged"):
                manifest.Manifest.read(file.parent)


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_lost_file_is_found(harm: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path) / "step-00000002"
    file = folder / "rank-00000.safetensors"
    file.unlink() if harm == "gone" else os.truncate(file, 1000)
    with pytest.raises(InputError, match=r"rank-00000\.safetensors"):
        verify(folder)


def test_a_piece_is_checked_as_it_is_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the disk changes its mind after the first look."""
    folder = copy_of(saved, tmp_path) / "step-00000002"
    file = folder / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(store, "faults", lambda *_: iter(()))
    engine, _ = make(one_rank(), 1)
    with pytest.raises(InputError, match="damaged"):
        paceline.load(folder, engine)


def test_a_damaged_newest_one_is_passed_over(tmp_path: Path) -> None:
    engine, optim = make(one_rank(), 1)
    for _ in range(2):
        train(engine, optim, 1)
        paceline.save(tmp_path, engine, extra={"at": engine.step})
    (tmp_path / "step-00000002" / "rank-00000.safetensors").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"step-00000002.*going on from .*step-00000001"):
        assert paceline.load(tmp_path, engine) == {"at": 1}
    assert engine.step == 1
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="every checkpoint below"):
        paceline.load(tmp_path, engine)


def test_nothing_there(tmp_path: Path) -> None:
    engine, _ = make(one_rank(), 0)
    assert paceline.load(tmp_path / "absent", engine) is None and newest(tmp_path) is None
    with pytest.raises(InputError, match=r"step-00000007.*cannot be read"):
        paceline.load(tmp_path / "step-00000007", engine)


@pytest.mark.parametrize(
    ("lost", "said"),
    [(("master", "layers.2.trained.bias"), "no master 'layers.2.trained.bias'"),
     (("param", "layers.0.frozen.weight"), "no param 'layers.0.frozen.weight'"),
     (("exp_avg", "embed.weight"), "no exp_avg 'embed.weight'"), (("buffer", "scale"), "no buffer 'scale'")],
)  # fmt: skip
def test_a_missing_tensor_is_named(lost: tuple[str, str], said: str, saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path) / "step-00000002"
    about = manifest.Manifest.read(folder)
    about.entries[:] = [e for e in about.entries if (e.kind, e.name) != lost]
    (folder / "manifest.json").write_bytes(about.data())
    engine, _ = make(one_rank(), 2)
    with pytest.raises(InputError, match=said):
        paceline.load(folder, engine)


def test_another_model_is_refused(saved: Path) -> None:
    engine, _ = make(one_rank(), 2, vocabulary=66)
    with pytest.raises(InputError, match=r"'embed.weight' in shape \(67, 150\), this model has \(66, 150\)"):
        paceline.load(saved, engine)
    module = Mixed()
    module.layers[0].trained.requires_grad_(False)
    engine = paceline.shard(module, one_rank(), stage=2)
    with pytest.raises(InputError, match=r"no param 'layers\.0\.trained\.\w+'.*holds it as master"):
        paceline.load(saved, engine)
    engine = paceline.shard(Mixed(), one_rank(), stage=2)
    engine.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match="AdamW"):
        paceline.load(saved, engine)


def test_weights_alone(saved: Path) -> None:
    engine = paceline.shard(Mixed(9), one_rank(), stage=1)
    paceline.load(saved, engine)
    assert engine.step == 2 and {k for k, _ in state(engine)} == {"master", "param", "buffer"}


def test_a_gap_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, optim = make(one_rank(), 3)
    train(engine, optim, 1)
    pieces = engine.pieces(owned=True)
    for wrong in (pieces[1:], [p for p in pieces if p.kind != "param"], [*pieces, pieces[0]]):
        monkeypatch.setattr(engine, "pieces", lambda owned=True, wrong=wrong: wrong)
        with pytest.raises(RunFailed, match=r"gap or an overlap|occurs twice"):
            save(tmp_path, engine)
        assert os.listdir(tmp_path) == []


def test_retention_and_leftovers(tmp_path: Path) -> None:
    engine, _ = make(one_rank(), 0)
    (tmp_path / ".step-00000001.tmp-1-dead").mkdir()
    (tmp_path / "step-00000100").mkdir()  # no manifest: never a checkpoint, and not ours to delete
    (tmp_path / "notes").mkdir()
    for engine.step, stay in ((3, {3}), (20, {3, 20}), (100000000, {20, 100000000}), (7, {7, 20, 100000000})):
        save(tmp_path, engine, keep=2)  # the one just written stays also when newer ones exist
        assert {manifest.step_of(p) for p in list_checkpoints(tmp_path)} == stay
    names = ["notes", "step-00000007", "step-00000020", "step-00000100", "step-100000000"]
    assert sorted(os.listdir(tmp_path)) == names
    save(tmp_path, engine)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000007", "step-00000020", "step-100000000"]


def test_one_that_is_being_replaced_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make(one_rank(), 0)
    final = save(tmp_path, engine, extra={"n": 1})
    os.rename(final, tmp_path / ".step-00000000.old")  # a run that died between the two renames
    assert newest(tmp_path) == tmp_path / ".step-00000000.old"
    assert paceline.load(tmp_path, engine) == {"n": 1}
    monkeypatch.setattr(writer, "_commit", lambda *_: 1 / 0)
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        save(tmp_path, engine)
    assert paceline.load(tmp_path, engine) == {"n": 1}
    monkeypatch.undo()
    for n in (2, 3):
        save(tmp_path, engine, extra={"n": n})
        assert os.listdir(tmp_path) == ["step-00000000"] and paceline.load(tmp_path, engine) == {"n": n}


def test_a_full_disk(tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the kernel refuses the write in the middle of a file."""
    engine, optim = make(one_rank(), 2)
    first = save(tmp_path, engine)
    train(engine, optim, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(RunFailed, match=rf"rank 0, .*rank-00000\.safetensors: {os.strerror(errno.EFBIG)}"):
            save(tmp_path, engine, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == [first.name]
    verify(first)
    assert save(tmp_path, engine, keep=1).name == "step-00000001"


def test_no_space_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make(one_rank(), 0)
    dead = tmp_path / ".step-00000001.tmp-1-dead"
    dead.mkdir()

    def full(path: Path, data: bytes) -> None:
        assert not dead.exists()  # what a dead run left makes room first
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(store, "write_synced", full)
    with pytest.raises(RunFailed, match=r"rank 0, .*manifest\.json: No space left on device"):
        save(tmp_path, engine)
    assert os.listdir(tmp_path) == []


def test_extra_that_is_not_json(tmp_path: Path) -> None:
    engine, _ = make(one_rank(), 0)
    with pytest.raises(RunFailed, match="not JSON serializable"):
        save(tmp_path, engine, extra={"x": object()})
    assert os.listdir(tmp_path) == []


def test_killed_while_saving(tmp_path: Path) -> None:
    """25 kills at random moments of a loop of saves: the newest one always loads, and no step goes back."""
    chance = random.Random(3)
    engine, _ = make(one_rank(), 0)
    last = 0
    for _ in range(25):
        with Saver(tmp_path, save_for_ever) as saver:
            saver.wait_for_step(last + 1)
            time.sleep(chance.uniform(0, 0.04))
        found = newest(tmp_path)
        assert found is not None
        verify(found)
        extra = paceline.load(tmp_path, engine)
        assert extra is not None and extra["step"] == engine.step > last
        assert torch.equal(engine.full("embed.weight"), torch.full((67, 150), float(engine.step)))
        last = engine.step
    assert len(os.listdir(tmp_path)) <= 2 + 2


def test_killed_before_each_file_operation(tmp_path: Path) -> None:
    """Saves a step, and then that step once more; a kill at any place leaves the one before or the one after."""
    engine, _ = make(one_rank(), 0)
    original = tmp_path / "original"
    save(original, engine, extra={"save": 0})
    seen = []
    for at in range(200):
        root = tmp_path / str(at)
        shutil.copytree(original, root)
        saver = Saver(root, save_twice_and_die, at)
        saver.process.start()
        saver.process.join()
        found = newest(root)
        assert found is not None, at
        verify(found)
        extra = paceline.load(root, engine)
        assert extra is not None
        seen.append(extra["save"])
        if saver.process.exitcode == 0:
            break
        save(root, engine)
        assert all(manifest.step_of(p) is not None and p.name.startswith("step-") for p in root.iterdir())
    assert seen == sorted(seen) and set(seen) == {0, 1, 2} and len(seen) > 20


def save_twice_and_die(root: Path, at: int) -> None:
    """Kills itself before the file operation number `at` below `root`."""
    left = at

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        where = str(arguments[0]) if event in OPERATIONS else "/"
        if where.startswith(str(root)) or not where.startswith("/"):  # rmtree works from open folders
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    engine, _ = make(one_rank(), 0)
    paceline.load(root, engine)
    engine.step = 1
    sys.addaudithook(hook)
    for number in (1, 2):
        save(root, engine, extra={"save": number}, keep=1)


OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


class Saver:
    """A child that saves until it is killed. One server imports torch, the children are its forks."""

    def __init__(self, root: Path, body: Callable[..., None], *args: Any) -> None:
        self.root = root
        context = multiprocessing.get_context("forkserver")
        # torch.optim imports dynamo at first use
        context.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "paceline.checkpoint", "paceline.zero"])
        self.process = context.Process(target=body, args=(root, *args))

    def __enter__(self) -> "Saver":
        self.process.start()
        return self

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 30
        while not any((manifest.step_of(p) or 0) >= step for p in list_checkpoints(self.root)):
            assert time.monotonic() < deadline and self.process.is_alive()
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def save_for_ever(root: Path) -> None:
    engine, _ = make(one_rank(), 0)
    paceline.load(root, engine)
    while True:
        engine.step += 1
        for piece in engine.pieces(owned=True):
            if piece.name == "embed.weight":
                piece.tensor.fill_(engine.step)
        save(root, engine, extra={"step": engine.step}, keep=2)


def test_the_verb(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_of(saved, tmp_path)
    assert main(["ckpt", "ls", str(root)]) == 0
    assert "step-00000002  step 2" in capsys.readouterr().out
    assert main(["ckpt", "show", str(root)]) == 0
    assert "exp_avg_sq" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(root / "step-00000002")]) == 0
    assert main(["ckpt", "ls", str(tmp_path / "nothing")]) == 2
    (root / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert main(["ckpt", "verify", str(root)]) == 2
    assert "rank-00000.safetensors has 0 bytes" in capsys.readouterr().err.replace("\n", " ")
