"""What a person sees: a progress bar on a terminal, one line a step elsewhere."""

import sys
from typing import Self

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.core.records import EvalRecord, Record, SaveRecord, StepRecord


def step_line(record: StepRecord, steps: int) -> str:
    """`step 12/300  loss 3.2101  norm 0.81  lr 3.0e-04  5,312 tok/s  0.71 GiB`."""
    rate = record.tokens / record.seconds if record.seconds else 0.0
    return (
        f"step {record.step}/{steps}  loss {record.loss:.4f}  norm {record.grad_norm:.2f}  lr {record.lr:.1e}  "
        f"{rate:,.0f} tok/s  {record.memory_bytes / 2**30:.2f} GiB"
    )


class Console:
    """Prints records on standard output; open it with `with`."""

    def __init__(self, steps: int, start: int = 0, log_every: int = 1) -> None:
        self._steps, self._start, self._every = steps, start, log_every
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                console=Terminal(file=sys.stdout),
            )  # fmt: skip

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("training", total=self._steps, completed=self._start, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def __call__(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            if self._progress is not None and self._task is not None:
                note = step_line(record, self._steps).split("  ", 1)[1]
                self._progress.update(self._task, completed=record.step, note=note)
            elif record.step % self._every == 0 or record.step == self._steps:
                self.say(step_line(record, self._steps))
        elif isinstance(record, EvalRecord):
            self.say(f"step {record.step}  evaluation loss {record.loss:.4f} over {record.tokens:,} tokens")
        elif isinstance(record, SaveRecord):
            size = record.bytes / 2**20
            self.say(f"step {record.step}  saved {record.path} ({size:.1f} MiB in {record.seconds:.2f} s)")
