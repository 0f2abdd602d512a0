"""Loading: each rank reads the intervals that it needs, whatever stage and world size wrote them."""

import os
import warnings
import zlib
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import manifest, store
from paceline.checkpoint.manifest import Entry, Manifest
from paceline.core.errors import InputError
from paceline.zero import Engine


class Reader:
    """Reads intervals of tensors from one checkpoint. Every piece that is touched is checked once, whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._tensors = self.manifest.by_tensor()
        self._checked: dict[tuple[str, int], bytes] = {}

    def fetch(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` of a flattened tensor, 1-D."""
        entries = self._tensors.get((kind, name))
        if entries is None:
            raise InputError(
                f"checkpoint {self.folder} has no {kind} {name!r}: the model or its optimizer differs from the one that "
                f"wrote it. Load it into the same model, or start a new run."
            )
        out = torch.empty(stop - start, dtype=entries[0].torch_dtype)
        first = bisect_right([e.start for e in entries], start) - 1
        for entry in entries[max(0, first) :]:
            low, high = max(start, entry.start), min(stop, entry.stop)
            if low < high:
                out[low - start : high - start] = self._piece(entry)[low - entry.start : high - entry.start]
        return out

    def whole(self, kind: str, name: str) -> torch.Tensor:
        """A whole tensor in its shape."""
        entries = self._tensors[kind, name]
        return self.fetch(kind, name, 0, entries[-1].stop).view(entries[0].shape)

    def names(self, *kinds: str) -> list[tuple[str, str]]:
        return [key for key in self._tensors if key[0] in kinds]

    def _piece(self, entry: Entry) -> torch.Tensor:
        path = self.folder / entry.file
        try:
            with path.open("rb", buffering=0) as file:
                data = bytearray(os.pread(file.fileno(), entry.nbytes, entry.offset))
                while data and len(data) < entry.nbytes:
                    more = os.pread(file.fileno(), entry.nbytes - len(data), entry.offset + len(data))
                    if not more:
                        break
                    data += more
        except OSError as error:
            raise InputError(f"checkpoint file {path} cannot be read: {error.strerror}.") from None
        if len(data) != entry.nbytes or zlib.crc32(data) != entry.crc32:
            raise InputError(
                f"checkpoint {self.folder} is damaged: {entry.kind} {entry.name!r} in {entry.file} is not what was "
                f"written (its checksum differs). Use another checkpoint."
            )
        return torch.frombuffer(data, dtype=entry.torch_dtype)


def load(root: str | os.PathLike[str], engine: Engine, optim: object = None) -> dict[str, Any] | None:
    """Fills the engine from a checkpoint and returns its `extra`. Collective.

    Args:
        root: a folder of checkpoints, of which the newest sound one is taken, or one checkpoint.

    Returns:
        None if there is no checkpoint below `root`.

    Raises:
        InputError: the named checkpoint, or every one, is damaged; or it does not fit the model.
    """
    mesh, root = engine.mesh, Path(root)
    chosen, problem = mesh.broadcast_object(_choose(root) if mesh.is_main else None)
    if problem:
        raise InputError(problem)
    if chosen is None:
        return None
    reader = Reader(chosen)
    known = {(p.kind, p.name) for p in engine.pieces(owned=False)}
    kinds = {"master", "param", "buffer"}
    stored = {key for key in reader._tensors if key[0] in kinds}
    everyone = {key for keys in mesh.all_gather_object({k for k in known if k[0] in kinds}) for key in keys}
    if stored - everyone:
        kind, name = sorted(stored - everyone)[0]
        raise InputError(
            f"checkpoint {chosen} holds {kind} {name!r}, which this model does not have: load it into the model that "
            f"wrote it."
        )
    engine.load(reader.manifest.scalars, reader.fetch)
    return reader.manifest.extra


def _choose(root: Path) -> tuple[Path | None, str | None]:
    """The checkpoint to load, or what is wrong. A damaged newest one is passed over with a warning."""
    if manifest.step_of(root) is not None:
        wrong = list(store.faults(root))
        return root, f"checkpoint {root} is damaged: {'; '.join(wrong)}. Use another one." if wrong else None
    found = store.list_checkpoints(root)
    said: list[str] = []
    for folder in reversed(found):
        wrong = list(store.faults(folder))
        if not wrong:
            if said:
                warnings.warn(f"{'; '.join(said)}: going on from {folder}", stacklevel=2)
            return folder, None
        said += wrong
    if found:
        return None, f"every checkpoint below {root} is damaged: {'; '.join(said)}. Restore one, or use a new run.dir."
    return None, None
