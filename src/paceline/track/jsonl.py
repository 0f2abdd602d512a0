"""The run log: one JSON object a record, written at once, appended to on resume."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.records import Record


class RunLog:
    """Appends records to a file. A line that a crash cut short is dropped when the log is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_bytes()
            whole = text.rfind(b"\n") + 1
            if whole != len(text):
                with path.open("r+b") as file:
                    file.truncate(whole)
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        self._file.write(json.dumps(record.as_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of a log, those of one kind if `kind` is given. A record of a step that was run again comes twice."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                record = json.loads(line)
                if kind is None or record["kind"] == kind:
                    yield record


def losses(path: Path, kind: str = "step") -> dict[int, float]:
    """Loss by step, the latest run of each step."""
    return {record["step"]: record["loss"] for record in read(path, kind)}
