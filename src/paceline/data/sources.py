"""Where text comes from: local files, folders and patterns, JSONL, or the Python standard library's own sources."""

import glob
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.errors import InputError

STDLIB = "stdlib"
SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def files(sources: Sequence[str]) -> list[Path]:
    """The files behind sources, sorted, each once.

    Raises:
        InputError: a source that is missing, or a folder or pattern in which there is no text.
    """
    found: dict[Path, None] = {}
    for source in sources:
        found.update(dict.fromkeys(_stdlib() if source == STDLIB else _local(source)))
    return list(found)


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts))


def _local(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    if not found:
        what = f"holds no file ending in {', '.join(SUFFIXES)}" if path.is_dir() else "does not exist"
        raise InputError(
            f"data source {source!r} {what} (looked in {Path.cwd()}): give a file, a folder, a pattern such as "
            f"'texts/**/*.txt', or `stdlib`."
        )
    return found


def documents(paths: Sequence[Path], text_key: str) -> Iterator[str]:
    """The documents: a text file is one, a JSONL file has one a line. Empty ones are left out.

    Raises:
        InputError: a file that is not UTF-8, a line that is not JSON or has no text; names file and line.
    """
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            line = path.read_bytes()[: error.start].count(b"\n") + 1
            if "stdlib" in sysconfig.get_paths() and str(path).startswith(sysconfig.get_paths()["stdlib"]):
                continue  # a few library files declare another encoding
            raise InputError(f"{path}:{line} is not UTF-8 text: convert the file, or leave it out.") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from None
        if path.suffix == ".jsonl":
            yield from _lines(path, text, text_key)
        elif text.strip():
            yield text


def _lines(path: Path, text: str, text_key: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number} is not JSON ({error}): a JSONL file has one object a line.") from None
        value = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(value, str):
            keys = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
            raise InputError(
                f"{path}:{number} has no text under {text_key!r} (found: {keys}): set data.text_key to the right key."
            )
        if value.strip():
            yield value
