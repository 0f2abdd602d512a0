"""Folders that are complete or not there: drafts, checksums, commit, retention."""

import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import Manifest
from paceline.core.errors import InputError

_CHUNK = 1 << 22


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints below a folder, oldest first."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if manifest.step_of(p) is not None and (p / manifest.NAME).exists()]
    return sorted(found, key=lambda p: manifest.step_of(p) or 0)


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint, without reading its tensors."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def draft_name(step: int) -> str:
    return f".{manifest.folder_name(step)}.draft-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def commit(draft: Path, root: Path, step: int) -> Path:
    """Gives a finished draft its name. A checkpoint of the same step is replaced; it is gone only once the new one is there."""
    sync_folder(draft)
    final = root / manifest.folder_name(step)
    if final.exists():
        old = draft.with_name(draft.name + ".old")
        os.rename(final, old)
        os.rename(draft, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(draft, final)
    sync_folder(root)
    return final


def retain(root: Path, keep: int | None, current: Path) -> None:
    """Deletes all but the `keep` newest, never `current`; and drafts that died with their run."""
    if keep is not None:
        for old in list_checkpoints(root)[: -max(1, keep)]:
            if old != current:
                doomed = old.with_name(f".{old.name}.draft-old-{uuid.uuid4().hex[:6]}")
                os.rename(old, doomed)  # a folder that is half deleted must not look complete
                shutil.rmtree(doomed, ignore_errors=True)
    for leftover in root.glob(".step-*.draft-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def faults(folder: Path) -> Iterator[str]:
    """What differs from the manifest, a line each; nothing for a sound checkpoint."""
    try:
        found = Manifest.read(folder)
    except InputError as error:
        yield str(error)
        return
    for name, said in found.files.items():
        path = folder / name
        if not path.exists():
            yield f"{path} is missing"
        elif path.stat().st_size != said["size"]:
            yield f"{path} has {path.stat().st_size} bytes, the manifest says {said['size']}"
        elif checksum(path) != said["crc32"]:
            yield f"{path} is not what was written: its checksum differs"


def verify(folder: Path) -> None:
    """Reads every byte; InputError names what is wrong."""
    wrong = list(faults(folder))
    if wrong:
        raise InputError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}. Use another one.")
