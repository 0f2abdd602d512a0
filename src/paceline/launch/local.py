"""Starts the ranks of one host and watches them: one that dies ends the others, a signal lets all of them save.

Loads no torch: the launcher stays small, and it lives on when a rank does not.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from paceline.core.errors import InputError, RunFailed
from paceline.launch.environment import find_port, rank_environment, visible_gpus
from paceline.launch.rank import Rank
from paceline.plan import usable_cores

__all__ = ["LocalJob", "run"]

_POLL_S = 0.05
_SETTLE_S = 0.3
_EXPLAINED = (2, 3)
_INTERRUPTED = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """What to start.

    Attributes:
        argv: the command of every rank.
        procs: how many ranks.
        port: where rank 0 listens; None: any free port.
        log_dir: folder for `rank-N.log`; None: no logs.
        grace_s: seconds that ranks have to save after a signal.
        kill_after_s: seconds from SIGTERM to SIGKILL for ranks that outlived a dead one.
        environment: what the ranks inherit; None: ours.
    """

    argv: Sequence[str]
    procs: int
    port: int | None = None
    log_dir: Path | None = None
    grace_s: float = 60.0
    kill_after_s: float = 4.0
    environment: Mapping[str, str] | None = None


def run(job: LocalJob) -> int:
    """Run all ranks to their end and return the exit code of the job.

    0: all ranks ended well. 2 and 3: a rank said what was wrong with the input, or that it does not fit; its words have been
    shown. 75: a signal came and the ranks saved. 128 + signal: it came before they could.

    Raises:
        InputError: the port is in use, or the command cannot be started.
        RunFailed: a rank failed; names it, its exit code or signal, and its last lines.
    """
    if job.procs < 1:
        raise InputError(f"{job.procs} ranks are asked for: at least 1 is needed.")
    base = dict(os.environ if job.environment is None else job.environment)
    port, cores, gpus = find_port(job.port), usable_cores(), visible_gpus(base)[0]
    if job.log_dir is not None:
        _make_folder(job.log_dir)
    with _Signals() as signals:
        ranks: list[Rank] = []
        try:
            for number in range(job.procs):
                environment = rank_environment(base, rank=number, procs=job.procs, port=port, cores=cores, gpus=gpus)
                ranks.append(Rank(number, job.argv, environment, job.log_dir))
            for rank in ranks:
                rank.follow()
            return _Watch(job, ranks, signals).until_end()
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.finish()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The log folder {folder} cannot be made: {error.strerror}.") from None


class _Signals:
    """Notes SIGTERM and SIGINT instead of dying of them, while it is open. Outside the main thread it notes nothing."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, lambda received, _: self.received.append(received))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Watch:
    """Follows the ranks to their end."""

    def __init__(self, job: LocalJob, ranks: Sequence[Rank], signals: _Signals) -> None:
        self.job = job
        self.ranks = ranks
        self.signals = signals
        self.started = time.monotonic()
        self.forwarded: int | None = None
        self.kill_at: float | None = None

    def until_end(self) -> int:
        while True:
            codes = [rank.code for rank in self.ranks]
            failed = self._failed(codes)
            if failed is not None:
                return self._end_others(failed)
            if all(code is not None for code in codes):
                return self._verdict(codes)
            if _INTERRUPTED in codes and self.kill_at is None:
                # A rank was told to stop by someone else (a scheduler that signals each process); the others have as long.
                self.kill_at = time.monotonic() + self.job.grace_s
            self._heed_signals()
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                return self._out_of_grace()
            time.sleep(_POLL_S)

    def _heed_signals(self) -> None:
        received = self.signals.received
        if received and self.forwarded is None:
            self.forwarded = received[0]
            self.kill_at = time.monotonic() + self.job.grace_s
            for rank in self.ranks:
                rank.send(self.forwarded)
        elif self.forwarded is not None and received[1:].count(signal.SIGINT) > 0:
            self.kill_at = 0.0  # Ctrl-C once more: the user will not wait. Repeated SIGTERMs are a scheduler's habit.

    def _failed(self, codes: Sequence[int | None]) -> Rank | None:
        """The rank whose end is the cause: when several are dead, a killed one before one that noticed a lost peer."""
        fine: tuple[int | None, ...] = (None, 0, _INTERRUPTED)
        if self.forwarded is not None:
            fine = (*fine, -self.forwarded, 128 + self.forwarded)
        if all(code in fine for code in codes):
            return None
        if any(code is None for code in codes):
            time.sleep(_SETTLE_S)
        failed = [rank for rank in self.ranks if rank.code not in fine]
        return min(failed, key=lambda rank: (_severity(rank.code), rank.number))

    def _end_others(self, failed: Rank) -> int:
        code = failed.code
        assert code is not None
        after = time.monotonic() - self.started
        self._stop_all()
        for rank in self.ranks:
            rank.finish()
        if code in _EXPLAINED:
            if failed.number != 0 and self.ranks[0].code != code:
                os.write(2, ("\n".join(failed.tail) + "\n").encode())
            return code
        raise RunFailed(self._paragraph(failed, code, after))

    def _stop_all(self) -> None:
        for rank in self.ranks:
            rank.send(signal.SIGTERM)
        deadline = time.monotonic() + self.job.kill_after_s
        while time.monotonic() < deadline and any(rank.code is None for rank in self.ranks):
            time.sleep(_POLL_S)
        for rank in self.ranks:
            rank.kill()

    def _paragraph(self, failed: Rank, code: int, after: float) -> str:
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        others = f"; the other {self.job.procs - 1} were stopped" if self.job.procs > 1 else ""
        hint = ""
        if code == -signal.SIGKILL:
            hint = " SIGKILL mostly comes from the kernel when memory runs out (see dmesg) or from a scheduler."
        log = f" All it said: {failed.log}." if failed.log else ""
        tail = [line for line in failed.tail if line.strip()]
        said = "Its last lines:\n" + "\n".join(f"  {line}" for line in tail) if tail else "It wrote nothing to stderr."
        return (
            f"Rank {failed.number} of {self.job.procs} {how} after {after:.0f} s{others}.{hint} Saved checkpoints are untouched: "
            f"the same command goes on from the newest.{log} {said}"
        )

    def _verdict(self, codes: Sequence[int | None]) -> int:
        if self.forwarded is not None and any(code in (-self.forwarded, 128 + self.forwarded) for code in codes):
            return 128 + self.forwarded
        return _INTERRUPTED if _INTERRUPTED in codes else 0

    def _out_of_grace(self) -> int:
        late = [rank.number for rank in self.ranks if rank.code is None]
        for rank in self.ranks:
            rank.kill()
        name = _signal_name(self.forwarded) if self.forwarded is not None else "the stop of another rank"
        waited = "at the second Ctrl-C" if self.kill_at == 0.0 else f"within {self.job.grace_s:.0f} s"
        raise RunFailed(
            f"Ranks {', '.join(str(number) for number in late)} had not ended {waited} after {name} and were killed. Checkpoints "
            "saved before are untouched: the same command goes on from the newest."
        )


def _severity(code: int | None) -> int:
    if code is not None and code < 0 and code != -signal.SIGABRT:
        return 0
    return 1 if code in _EXPLAINED else 2


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
