"""The disk format, and the only module that knows it.

Note [Format]
-------------
A checkpoint is a folder `step-00000120` with `manifest.json` and one safetensors file a writing rank. The manifest says
of every piece which elements of which tensor it is, and in which file and where; of every file its size and checksum. Its
own first line holds the checksum of the lines below, and the whole is JSON. It is written last, and the folder gets its
name after that: a folder with that name is complete.

Drafts are `.step-00000120.tmp-<id>`. A checkpoint that is about to be replaced by one of the same step is
`.step-00000120.old` for a moment; if the run dies in that moment it still counts.
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
_STEP = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old")


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

    def data(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).removeprefix("{\n").encode() + b"\n"
        return _head(body) + body

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises InputError for one that is missing, damaged or of another format."""
        path = folder / NAME
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{folder} is not a checkpoint: {path.name} cannot be read ({error.strerror}).") from None
        head, newline, body = data.partition(b"\n")
        if head + newline != _head(body):
            raise InputError(
                f"checkpoint {folder} is damaged: {path.name} is not what was written (its checksum differs). Use "
                f"another one."
            )
        fields = json.loads(data)
        del fields["crc32"]
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


def _head(body: bytes) -> bytes:
    """The manifest's first line."""
    return f'{{"crc32": "{zlib.crc32(body):08x}",\n'.encode()


def refuse_gaps(entries: Iterable[Entry], sizes: Mapping[tuple[str, str], int]) -> None:
    """Every element of every tensor exactly once, or RunFailed: a placeholder must never pass for a weight.

    Args:
        sizes: elements of every tensor that there must be, by (kind, name).
    """
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {key: [] for key in sizes}
    for entry in entries:
        if sizes.get((entry.kind, entry.name)) != prod(entry.shape):
            raise RunFailed(f"a piece of {entry.kind} {entry.name!r}, shape {entry.shape}, belongs to no tensor.")
        spans[entry.kind, entry.name].append((entry.start, entry.stop))
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


def draft_name(step: int, token: str) -> str:
    return f".{folder_name(step)}.tmp-{token}"


def aside(folder: Path) -> Path:
    """Where a checkpoint is while one of the same step takes its place."""
    return folder.with_name(f".{folder.name}.old")


def is_draft(folder: Path) -> bool:
    return folder.name.startswith(".step-") and ".tmp-" in folder.name


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for another folder."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1) or match.group(2)) if match else None


_SAFETENSORS = {
    "float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
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
        code = _SAFETENSORS.get(str(dtype).removeprefix("torch."))
        if code is None:
            raise RunFailed(
                f"{key} is {dtype}, which safetensors cannot hold: make it non-persistent or another dtype."
            )
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        places[key], at = at, end
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head, {key: 8 + len(head) + place for key, place in places.items()}
