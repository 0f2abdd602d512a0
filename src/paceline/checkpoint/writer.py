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
from paceline.core.errors import InputError, RunFailed
from paceline.zero import Engine, Piece

_AT_ONCE = 1 << 24


def save(
    root: str | os.PathLike[str], engine: Engine, optim: object = None, *, extra: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:  # fmt: skip
    """Writes `root/step-XXXXXXXX` whole or not at all, and returns it. Collective.

    Args:
        root: folder of checkpoints, on a file system that all ranks see.
        optim: accepted for symmetry; the engine knows its optimizer.
        extra: JSON-able data to come back from `load`.
        keep: how many of the newest to keep; None: all.

    Raises:
        RunFailed: some rank could not write; names rank, path and reason. Earlier checkpoints are untouched.
    """
    mesh, root = engine.mesh, Path(root)
    draft = root / mesh.broadcast_object(store.draft_name(engine.step))
    problem, entries, files = None, [], {}
    try:
        draft.mkdir(parents=True, exist_ok=True)
        entries, files = _write(draft, f"rank-{mesh.rank:05d}.safetensors", engine.pieces(owned=True))
    except OSError as error:
        problem = f"rank {mesh.rank}: {error.strerror or error} ({error.filename or draft})"
    shared = mesh.all_gather_object((problem, entries, files))
    problems = [p for p, _, _ in shared if p]
    final: Path | None = None
    if not problems and mesh.is_main:
        whole = Manifest(
            engine.step, mesh.world, engine.scalars(), extra or {}, [e for _, es, _ in shared for e in es],
            {name: said for _, _, fs in shared for name, said in fs.items()},
            {"paceline": paceline.__version__, "torch": torch.__version__},
        )  # fmt: skip
        try:
            manifest.refuse_gaps(whole.entries)
            store.write_synced(draft / manifest.NAME, whole.text().encode())
            final = store.commit(draft, root, engine.step)
            store.retain(root, keep, final)
        except OSError as error:
            problems = [f"rank 0: {error.strerror or error} ({error.filename or draft})"]
        except RunFailed as error:
            problems = [str(error)]
    problems, final = mesh.broadcast_object((problems, final))
    if problems or final is None:
        if mesh.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise RunFailed(
            f"the checkpoint of step {engine.step} could not be written to {root}: {'; '.join(problems)}. Earlier "
            f"checkpoints are untouched; free space or choose another run.dir, and start again to go on from the last one."
        )
    return final


def _write(folder: Path, name: str, pieces: Sequence[Piece]) -> tuple[list[Entry], dict[str, dict[str, int]]]:
    """Streams this rank's pieces to one file; entries and the file's size and checksum."""
    if not pieces:
        return [], {}
    keys = [f"{p.kind}:{p.name}[{p.start}:{p.stop}]" for p in pieces]
    dtypes = [str(p.tensor.dtype).removeprefix("torch.") for p in pieces]
    sizes = {k: (p.tensor.dtype, (p.stop - p.start,)) for k, p in zip(keys, pieces, strict=True)}
    if len(sizes) != len(pieces):
        raise InputError("a tensor occurs twice in this checkpoint: two parameters or buffers have one name.")
    head, offsets = manifest.safetensors_header(sizes)
    entries: list[Entry] = []
    path = folder / name
    with path.open("wb", buffering=0) as file:
        file.write(head)
        total, size = zlib.crc32(head), len(head)
        for key, dtype, piece in zip(keys, dtypes, pieces, strict=True):
            data = memoryview(piece.tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
            crc = 0
            for at in range(0, len(data), _AT_ONCE):
                part = data[at : at + _AT_ONCE]
                _write_all(file, part)
                crc, total = zlib.crc32(part, crc), zlib.crc32(part, total)
            size += len(data)
            entries.append(
                Entry(piece.kind, piece.name, dtype, piece.shape, piece.start, piece.stop, name, offsets[key], crc)
            )
        os.fsync(file.fileno())
    return entries, {name: {"size": size, "crc32": total}}


def _write_all(file: Any, data: memoryview) -> None:
    """An unbuffered write may take a part only."""
    while data:
        data = data[file.write(data) :]
