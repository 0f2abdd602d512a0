"""Loading: each rank reads the intervals that it needs, whatever stage and world size wrote them."""

import os
import warnings
import zlib
from bisect import bisect_right
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import manifest, store
from paceline.checkpoint.manifest import Entry, Manifest
from paceline.core.errors import InputError
from paceline.mesh.mesh import Mesh
from paceline.zero import Engine

MODEL_KINDS = ("master", "param", "buffer")


class Reader:
    """Reads intervals of tensors from one checkpoint: the bytes asked for and no others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.tensors = self.manifest.by_tensor()

    def fetch(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` of a flattened tensor, 1-D.

        Raises InputError where the checkpoint lacks some of them, or a piece that is read whole is not what was written
        (`store.faults` finds the rest).
        """
        entries = self.tensors.get((kind, name))
        if entries is None:
            raise InputError(f"checkpoint {self.folder} has no {kind} {name!r}.")
        out = torch.empty(stop - start, dtype=entries[0].torch_dtype)
        at = start
        for entry in entries[max(0, bisect_right(entries, start, key=lambda e: e.start) - 1) :]:
            if at >= stop:
                break
            end = min(stop, entry.stop)
            if not entry.start <= at < end:
                break
            self._read(entry, at, out[at - start : end - start])
            at = end
        if at != stop:
            raise InputError(f"checkpoint {self.folder} lacks elements [{at}, {stop}) of {kind} {name!r}.")
        return out

    def whole(self, kind: str, name: str) -> torch.Tensor:
        """A whole tensor in its shape."""
        shape = self.tensors[kind, name][0].shape
        return self.fetch(kind, name, 0, prod(shape)).view(shape)

    def _read(self, entry: Entry, start: int, out: torch.Tensor) -> None:
        """Elements of one piece from `start` on, into `out`."""
        path = self.folder / entry.file
        data = memoryview(out.view(torch.uint8).numpy())
        at, left = entry.offset + (start - entry.start) * out.element_size(), data
        try:
            with path.open("rb", buffering=0) as file:
                while left and (count := os.preadv(file.fileno(), [left], at)):
                    left, at = left[count:], at + count
        except OSError as error:
            raise InputError(f"checkpoint file {path} cannot be read: {error.strerror}.") from None
        if left or (len(data) == entry.nbytes and zlib.crc32(data) != entry.crc32):
            raise InputError(
                f"checkpoint {self.folder} is damaged: {entry.kind} {entry.name!r} in {entry.file} is not what was "
                f"written. Use another checkpoint."
            )


class _AgreedFetch:
    """A fetch that keeps its first failure for later.

    One rank that raised in the middle of `engine.load` would leave the others waiting in its collectives.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader, self.problem = reader, ""

    def __call__(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        if not self.problem:
            try:
                return self._reader.fetch(kind, name, start, stop)
            except InputError as error:
                self.problem = str(error)
        return torch.zeros(stop - start)


def load(root: str | os.PathLike[str], engine: Engine, optim: object = None) -> dict[str, Any] | None:
    """Fills the engine from a checkpoint and returns its `extra`. Collective.

    Call it after `engine.optimizer(...)`, or before to take the weights alone.

    Args:
        root: a folder of checkpoints, of which the newest sound one is taken, or one checkpoint.
        optim: accepted for symmetry; the engine knows its optimizer.

    Returns:
        None if there is no checkpoint below `root`.

    Raises:
        InputError: the named checkpoint, or every one, is damaged; or it does not fit the model. On every rank.
    """
    mesh = engine.mesh
    chosen, passed_over = _choose(Path(root), mesh)
    if chosen is None:
        return None
    reader = Reader(chosen)
    _refuse_other_model(reader, engine)
    fetch = _AgreedFetch(reader)
    engine.load(reader.manifest.scalars, fetch)
    problems = [problem for problem in mesh.all_gather_object(fetch.problem) if problem]
    if problems:
        raise InputError(f"{problems[0]} The engine is half filled: load another checkpoint or start anew.")
    if passed_over and mesh.is_main:
        warnings.warn(f"{'; '.join(passed_over)}: going on from {chosen}", stacklevel=2)
    return reader.manifest.extra


def _choose(root: Path, mesh: Mesh) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, and what is wrong with newer ones. Ranks divide the reading."""
    named = manifest.step_of(root) is not None
    found = mesh.broadcast_object(([root] if named else store.list_checkpoints(root)) if mesh.is_main else None)
    said: list[str] = []
    for folder in reversed(found):
        shares = mesh.all_gather_object(list(store.faults(folder, mesh.rank, mesh.world)))
        wrong = list(dict.fromkeys(line for share in shares for line in share))
        if not wrong:
            return folder, said
        said += wrong
    if named:
        raise InputError(f"checkpoint {root} is damaged: {'; '.join(said)}. Use another one.")
    if found:
        raise InputError(
            f"every checkpoint below {root} is damaged: {'; '.join(said)}. Restore one, or start in another folder."
        )
    return None, said


def _refuse_other_model(reader: Reader, engine: Engine) -> None:
    """Names and shapes of the model and of the checkpoint must be the same, over all ranks."""
    mine = {(p.kind, p.name): p.shape for p in engine.pieces(owned=False) if p.kind in MODEL_KINDS}
    model: dict[tuple[str, str], tuple[int, ...]] = {}
    for part in engine.mesh.all_gather_object(mine):
        model |= part
    stored = {key: entries[0].shape for key, entries in reader.tensors.items() if key[0] in MODEL_KINDS}
    missing, unknown = sorted(model.keys() - stored.keys()), sorted(stored.keys() - model.keys())
    where = f"checkpoint {reader.folder}"
    remedy = "Load it into the model that wrote it, or start a new run in another folder."
    for kind, name in missing:
        others = [k for k, n in stored if n == name]
        as_other = f" (it holds it as {others[0]}: was it trained there and frozen here?)" if others else ""
        raise InputError(f"{where} has no {kind} {name!r}, which this model needs{as_other}. {remedy}")
    for kind, name in unknown:
        raise InputError(f"{where} holds {kind} {name!r}, which this model does not have. {remedy}")
    for key, shape in model.items():
        if stored[key] != shape:
            raise InputError(
                f"{where} holds {key[0]} {key[1]!r} in shape {stored[key]}, this model has {shape}. {remedy}"
            )
