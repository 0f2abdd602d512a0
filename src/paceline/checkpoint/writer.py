"""Saving: every rank writes what it owns, all agree, rank 0 commits."""

import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.checkpoint import manifest, store
from paceline.checkpoint.manifest import Entry, Manifest
from paceline.core.errors import PacelineError, RunFailed
from paceline.zero import Engine, Piece

_AT_ONCE = 1 << 24
Written = tuple[list[Entry], dict[str, dict[str, int]]]


def save(
    root: str | os.PathLike[str], engine: Engine, optim: object = None, *, extra: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:  # fmt: skip
    """Writes `root/step-XXXXXXXX` whole or not at all, and returns it. Collective.

    Args:
        root: folder of checkpoints, on a file system that all ranks see.
        optim: accepted for symmetry; the engine knows its optimizer.
        extra: JSON-able data to come back from `load`; rank 0's counts.
        keep: how many of the newest to keep; None: all.

    Raises:
        RunFailed: on every rank, if some rank could not write; names rank, path and reason. Earlier checkpoints are
            untouched.
    """
    mesh, root = engine.mesh, Path(root)
    mesh.meet("saving a checkpoint")
    draft, problem = mesh.broadcast_object(_draft(root, engine.step) if mesh.is_main else None)
    if problem is None:
        written, problem = _attempt(mesh.rank, draft, lambda: _write(draft, mesh.rank, engine.pieces(owned=True)))
        shared = mesh.all_gather_object((problem, written))
        problems = [p for p, _ in shared if p]
        final: Path | None = None
        if not problems and mesh.is_main:
            parts = [part for _, part in shared]
            final, problem = _attempt(0, draft, lambda: _commit(draft, root, engine, parts, extra or {}, keep))
            problems = [problem] if problem else []
        problems, final = mesh.broadcast_object((problems, final))
        if final is not None:
            return final
        problem = "; ".join(problems)
    if mesh.is_main and draft is not None:
        shutil.rmtree(draft, ignore_errors=True)
    raise RunFailed(
        f"the checkpoint of step {engine.step} could not be written to {root}: {problem}. Earlier checkpoints are "
        f"untouched; put that right (free space, or another folder) and start again to go on from the last one."
    )


def _draft(root: Path, step: int) -> tuple[Path | None, str | None]:
    return _attempt(0, root, lambda: store.new_draft(root, step))


def _attempt(rank: int, path: Path, action: Any) -> tuple[Any, str | None]:
    """The action's result, or what went wrong.

    Whatever it is: a rank that raised here alone would leave the others waiting for its answer.
    """
    try:
        return action(), None
    except OSError as error:
        return None, f"rank {rank}, {error.filename or path}: {error.strerror or error}"
    except PacelineError as error:
        return None, f"rank {rank}: {str(error).removesuffix('.')}"
    except Exception as error:  # noqa: BLE001
        return None, f"rank {rank}, {path}: {type(error).__name__}: {error}"


def _commit(
    draft: Path, root: Path, engine: Engine, parts: Sequence[Written], extra: dict[str, Any], keep: int | None
) -> Path:
    scalars = engine.scalars()
    whole = Manifest(
        engine.step, engine.mesh.world, scalars, extra,
        [entry for entries, _ in parts for entry in entries],
        {name: said for _, files in parts for name, said in files.items()},
        {"paceline": paceline.__version__, "torch": torch.__version__},
    )  # fmt: skip
    manifest.refuse_gaps(whole.entries, _sizes(engine, scalars))
    store.write_synced(draft / manifest.NAME, whole.data())
    final = store.commit(draft, root, engine.step)
    store.retain(root, keep, final)
    return final


def _sizes(engine: Engine, scalars: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Elements of all that a checkpoint of this engine must hold, from the model's layout and not from its pieces."""
    states = scalars.get("optimizer", {}).get("states", {})
    sizes = {("buffer", name): buffer.numel() for name, buffer in engine.persistent_buffers()}
    for unit in engine.units:
        for group in unit.groups:
            for slot in group.layout.slots:
                for kind in ("master", *states) if group.trainable else ("param",):
                    sizes[kind, slot.name] = slot.numel
    return sizes


def _write(folder: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Streams this rank's pieces to one file; entries and the file's size and checksum."""
    if not pieces:
        return [], {}
    path = folder / f"rank-{rank:05d}.safetensors"
    keys = [f"{p.kind}:{p.name}[{p.start}:{p.stop}]" for p in pieces]
    head, offsets = manifest.safetensors_header(
        {key: (p.tensor.dtype, (p.stop - p.start,)) for key, p in zip(keys, pieces, strict=True)}
    )
    if len(offsets) != len(pieces):
        raise RunFailed("a tensor occurs twice: two parameters or buffers have one name.")
    entries: list[Entry] = []
    try:
        with path.open("wb", buffering=0) as file:
            _write_all(file, memoryview(head))
            total, size = zlib.crc32(head), len(head)
            for key, piece in zip(keys, pieces, strict=True):
                data = memoryview(piece.tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
                crc = 0
                for at in range(0, len(data), _AT_ONCE):
                    part = data[at : at + _AT_ONCE]
                    _write_all(file, part)
                    crc, total = zlib.crc32(part, crc), zlib.crc32(part, total)
                size += len(data)
                dtype = str(piece.tensor.dtype).removeprefix("torch.")
                place = (path.name, offsets[key], crc)
                entries.append(Entry(piece.kind, piece.name, dtype, piece.shape, piece.start, piece.stop, *place))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write does not know its file's name
    return entries, {path.name: {"size": size, "crc32": total}}


def _write_all(file: Any, data: memoryview) -> None:
    """An unbuffered write may take a part only."""
    while data:
        data = data[file.write(data) :]
