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
StrPath = str | os.PathLike[str]


def list_checkpoints(root: StrPath) -> list[Path]:
    """Complete checkpoints below a folder, oldest first."""
    root = Path(root)
    if not root.is_dir():
        return []
    steps = {p: step for p in root.iterdir() if (step := manifest.step_of(p)) is not None}
    named = {step for p, step in steps.items() if p.name == manifest.folder_name(step)}
    found = [p for p, step in steps.items() if p.name == manifest.folder_name(step) or step not in named]
    return sorted((p for p in found if (p / manifest.NAME).exists()), key=steps.__getitem__)


def newest(root: StrPath) -> Path | None:
    """The newest complete checkpoint, without reading its tensors."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def new_draft(root: Path, step: int) -> Path:
    """An empty folder for a checkpoint in the making. Drafts that died with their run go first: they hold disk space."""
    created = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    if created:
        sync_folder(root.parent)
    _sweep(root)
    draft = root / manifest.draft_name(step, f"{os.getpid()}-{uuid.uuid4().hex[:6]}")
    draft.mkdir()
    return draft


def commit(draft: Path, root: Path, step: int) -> Path:
    """Gives a finished draft its name. At every moment a checkpoint of the same step is there, or its successor."""
    sync_folder(draft)
    final = root / manifest.folder_name(step)
    if final.exists():
        shutil.rmtree(manifest.aside(final), ignore_errors=True)
        os.rename(final, manifest.aside(final))
    os.rename(draft, final)
    sync_folder(root)
    return final


def retain(root: Path, keep: int | None, current: Path) -> None:
    """Deletes what `current` has replaced, and all but the `keep` newest; never `current` itself."""
    _sweep(root)
    for old in list_checkpoints(root)[: -max(1, keep)] if keep is not None else []:
        if old != current:
            doomed = root / manifest.draft_name(0, f"gone-{uuid.uuid4().hex[:6]}")
            os.rename(old, doomed)  # a folder that is half deleted must not look complete
            shutil.rmtree(doomed, ignore_errors=True)


def _sweep(root: Path) -> None:
    kept = set(list_checkpoints(root))
    for folder in root.iterdir():
        replaced = folder.name.endswith(".old") and manifest.step_of(folder) is not None and folder not in kept
        if manifest.is_draft(folder) or replaced:
            shutil.rmtree(folder, ignore_errors=True)


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


def faults(folder: Path, share: int = 0, shares: int = 1) -> Iterator[str]:
    """What differs from the manifest, a line each; nothing for a sound checkpoint.

    Args:
        share, shares: look at every `shares`-th file only, from number `share` on, so that ranks can divide the work.
    """
    try:
        found = Manifest.read(folder)
    except InputError as error:
        yield str(error)
        return
    for name, said in sorted(found.files.items())[share::shares]:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != said["size"]:
                yield f"{path} has {size} bytes, the manifest says {said['size']}"
            elif checksum(path) != said["crc32"]:
                yield f"{path} is not what was written: its checksum differs"
        except OSError as error:
            yield f"{path} cannot be read ({error.strerror})"


def verify(folder: StrPath) -> None:
    """Reads every byte; InputError names what is wrong."""
    wrong = list(faults(Path(folder)))
    if wrong:
        raise InputError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}. Use another one.")
