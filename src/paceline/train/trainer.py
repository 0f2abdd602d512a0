"""The loop: a generator of records."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import Interrupted
from paceline.core.records import EvalRecord, Record, SaveRecord, StepRecord
from paceline.track.system import memory_bytes
from paceline.train.evaluate import evaluate
from paceline.train.guard import SAVE, STOP, Guard
from paceline.train.schedule import Schedule
from paceline.zero import Engine, Optimizer

Loss = Callable[[Any, Any], tuple[Any, float]]


class Batches(Protocol):
    """What the trainer needs of a loader: pure functions of the step, blind to rank and world."""

    def micro_batches(self, step: int) -> int: ...
    def batch(self, step: int, leaf: int) -> Any: ...
    def eval_batches(self) -> int: ...
    def eval_batch(self, index: int) -> Any: ...


class Decision(Enum):
    """What an observer may ask for after a record."""

    CONTINUE = 0
    STOP = STOP
    SAVE = SAVE


Observer = Callable[[Record], Decision | None]
"""Called with every record on every rank. It may return a decision; it never changes the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long, how often. Periods are in optimizer steps, `save_seconds` in seconds; None: only at the end."""

    steps: int
    lr: float
    schedule: Schedule
    max_norm: float | None = 1.0
    evaluates: bool = True
    eval_every: int | None = None
    save_every: int | None = None
    save_seconds: float | None = None


class Trainer:
    """Trains `engine` on `loader` from the engine's step on.

    Args:
        save: writes a checkpoint of the current state and returns its path and its bytes; collective.
        tokens: counted tokens of the steps before.
    """

    def __init__(
        self, engine: Engine, optim: Optimizer, loader: Batches, loss: Loss, settings: Settings, *,
        save: Callable[[int], tuple[Path, int]], observers: Sequence[Observer] = (), tokens: int = 0,
    ) -> None:  # fmt: skip
        self.engine, self.optim, self.loader, self.loss, self.settings = engine, optim, loader, loss, settings
        self.tokens = tokens
        self._save_state, self._observers = save, observers
        self._saved_at = time.monotonic()
        self._wish = 0

    def steps(self) -> Iterator[Record]:
        """Yields a record for each step, evaluation and checkpoint; raises Interrupted after a signal, state saved."""
        s = self.settings
        with Guard() as guard:
            while self.engine.step < s.steps:
                record, wishes = self._step(guard)
                yield self._seen(record)
                stop, last = bool(wishes & STOP), self.engine.step == s.steps
                pace = s.eval_every and self.engine.step % s.eval_every == 0
                if s.evaluates and (last or (pace and not stop)):
                    yield self._seen(self._evaluate())
                due = s.save_every and self.engine.step % s.save_every == 0
                if last or stop or due or wishes & SAVE:
                    yield self._seen(self._save())
                if stop and not last:
                    raise Interrupted(
                        f"The run was asked to stop: it saved its state after step {self.engine.step} of {s.steps}. "
                        f"The same command goes on from there."
                    )

    def _step(self, guard: Guard) -> tuple[StepRecord, int]:
        started, step, s = time.perf_counter(), self.engine.step, self.settings
        lr = s.lr * s.schedule.factor(step)
        for group in self.optim.param_groups:
            group["lr"] = lr
        for leaf in self.engine.window(self.loader.micro_batches(step)):
            self.engine.backward(*self.loss(self.engine.module, self.loader.batch(step, leaf)))
        report = self.optim.step(s.max_norm, share=self._wishes(guard))
        self.tokens += int(report.weight)
        seconds = time.perf_counter() - started
        assert report.loss is not None
        wishes = 0
        for wish in report.shared:
            wishes |= int(wish)
        return StepRecord(
            step + 1, report.loss, report.grad_norm, lr, int(report.weight), self.tokens, seconds, memory_bytes()
        ), wishes

    def _wishes(self, guard: Guard) -> int:
        """This rank's wishes; the clock of rank 0 decides when a checkpoint is due by time."""
        wish, self._wish = self._wish | STOP * guard.stopping, 0
        due = self.settings.save_seconds is not None and time.monotonic() - self._saved_at >= self.settings.save_seconds
        return wish | SAVE * (due and self.engine.mesh.is_main)

    def _seen(self, record: Record) -> Record:
        for observer in self._observers:
            self._wish |= (observer(record) or Decision.CONTINUE).value
        return record

    def _evaluate(self) -> EvalRecord:
        return evaluate(self.engine, self.loader.eval_batches(), self.loader.eval_batch, self.loss)

    def _save(self) -> SaveRecord:
        started = time.perf_counter()
        path, size = self._save_state(self.tokens)
        self._saved_at = time.monotonic()
        return SaveRecord(self.engine.step, str(path), time.perf_counter() - started, size)
