"""Signals: the first SIGTERM or Ctrl-C finishes the step, saves and ends the run; the second ends it at once."""

import os
import signal
from types import FrameType
from typing import Any, Self

STOP, SAVE = 1, 2
"""What a rank may wish at the end of a step; wishes travel with the step's numbers, so that all ranks act alike."""


class Guard:
    """Catches SIGTERM and SIGINT while it is open. A signal that reaches one rank alone stops all of them."""

    def __init__(self) -> None:
        self.stopping = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            os._exit(128 + number)
        self.stopping = True
