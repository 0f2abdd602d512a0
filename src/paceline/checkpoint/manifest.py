"""The disk format, and the only module that knows it.

Note [Format]
-------------
A checkpoint is a folder `step-00000120` with `manifest.json` and one safetensors file a writing rank. The manifest says
of every piece which elements of which tensor it is, and in which file and where; of every file its size and checksum; and
its own first line is the checksum of the rest. It is written last, and the folder gets its name after that: a folder
with that name is complete.
"""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import InputError, RunFailed

FORMAT = 1
NAME = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Entry:
    """Elements `[start, stop)` of the flattened tensor `name` of one kind, as `offset` bytes into `file`."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    file: str
    offset: int
    crc32: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its numbers. `files`: name -> {"size": bytes, "crc32": checksum}."""

    step: int
    world: int
    scalars: dict[str, Any]
    extra: dict[str, Any]
    entries: list[Entry]
    files: dict[str, dict[str, int]]
    versions: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        return f"{zlib.crc32(body.encode()):08x}\n{body}\n"

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises InputError for one that is missing, damaged or of another format."""
        path = folder / NAME
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{folder} is not a checkpoint: {path.name} cannot be read ({error.strerror}).") from None
        head, _, body = data.partition(b"\n")
        try:
            if int(head, 16) != zlib.crc32(body.removesuffix(b"\n")):
                raise ValueError("its checksum differs")
            fields = json.loads(body)
        except ValueError as error:
            raise InputError(
                f"checkpoint {folder} is damaged: {path.name} is not what was written ({error}). Use another one."
            ) from None
        if fields.pop("format") != FORMAT:
            raise InputError(f"checkpoint {folder} has another format than {FORMAT}, which this version reads.")
        fields["entries"] = [Entry(**{**e, "shape": tuple(e["shape"])}) for e in fields["entries"]]
        return cls(**fields)

    def by_tensor(self) -> dict[tuple[str, str], list[Entry]]:
        """(kind, name) -> its pieces from the left."""
        found: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            found[entry.kind, entry.name].append(entry)
        return {key: sorted(entries, key=lambda e: e.start) for key, entries in found.items()}


def refuse_gaps(entries: Iterable[Entry]) -> None:
    """Every element of every tensor exactly once, or RunFailed: a placeholder must never pass for a weight."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[tuple[str, str], int] = {}
    for entry in entries:
        spans[entry.kind, entry.name].append((entry.start, entry.stop))
        sizes[entry.kind, entry.name] = prod(entry.shape)
    for (kind, name), pieces in spans.items():
        at = 0
        for start, stop in sorted(pieces):
            if start != at:
                break
            at = stop
        if at != sizes[kind, name]:
            raise RunFailed(
                f"the pieces of {kind} {name!r} cover {sum(b - a for a, b in pieces)} elements of {sizes[kind, name]}, "
                f"with a gap or an overlap at {at}: this checkpoint would be wrong, so it was not written."
            )


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for another folder."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


_SAFETENSORS = {
    "float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def safetensors_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Header bytes of a safetensors file of these tensors in this order, and where in the file each one's bytes start."""
    at = 0
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    for key, (dtype, shape) in tensors.items():
        end = at + prod(shape) * dtype.itemsize
        code = _SAFETENSORS[str(dtype).removeprefix("torch.")]
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        places[key], at = at, end
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head, {key: 8 + len(head) + place for key, place in places.items()}
