"""One local rank as a child process: started so that it cannot outlive us, its output followed line by line."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from paceline.core.errors import InputError

__all__ = ["Rank"]

_TAIL = 20
_STDOUT, _STDERR = 1, 2
_PR_SET_PDEATHSIG = 1


class Rank:
    """A child process and its own process group, so that its helpers end with it.

    Rank 0 speaks to the user: its stdout is ours, its stderr is passed on as it comes. Lines that other ranks print carry
    `[rank 1]`; their stderr goes to the log and the tail, since all ranks mostly say the same.
    """

    def __init__(self, number: int, argv: Sequence[str], environment: Mapping[str, str], log_dir: Path | None) -> None:
        self.number = number
        self.log = log_dir / f"rank-{number}.log" if log_dir else None
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._finished = False
        # Appending: the log of the attempt before may be what explains this one.
        self._sink = self.log.open("ab", buffering=0) if self.log else None
        try:
            self.process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=None if number == 0 else subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except OSError as error:
            self._close()
            raise InputError(f"The command of a rank cannot be started: {argv[0]}: {error.strerror}.") from None
        self._followers: list[threading.Thread] = []

    def follow(self) -> None:
        """Start reading the output. Only after all ranks are started: forking beside threads is not safe."""
        assert self.process.stderr is not None
        show = partial(_pass_on, _STDERR) if self.number == 0 else _drop
        self._read(self.process.stderr, self._on_stderr, show)
        if self.process.stdout is not None:
            self._read(self.process.stdout, self._on_stdout, _drop)

    def send(self, number: int) -> None:
        """Send a signal to the rank's process, unless it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the rank and all it started, at once."""
        if self._finished:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def finish(self) -> None:
        """Reap the process, end what it left behind and read the rest of its output. Once: then its number is free again."""
        if self._finished:
            return
        self.process.wait()
        self.kill()
        self._finished = True
        for follower in self._followers:
            follower.join(timeout=1.0)
        self._close()

    @property
    def code(self) -> int | None:
        """The exit code; minus the number of the signal that ended it; None while it runs."""
        return self.process.poll()

    def _read(self, stream: IO[bytes], on_line: Callable[[bytes], None], on_piece: Callable[[bytes], None]) -> None:
        """Hand pieces on as they come, and whole lines to the log: Python writes a line to stderr in several pieces."""

        def pump() -> None:
            begun = b""
            while piece := os.read(stream.fileno(), 1 << 16):
                on_piece(piece)
                *whole, begun = (begun + piece).split(b"\n")
                for line in whole:
                    on_line(line + b"\n")
            if begun:
                on_line(begun + b"\n")
            stream.close()

        thread = threading.Thread(target=pump, name=f"rank-{self.number}", daemon=True)
        thread.start()
        self._followers.append(thread)

    def _on_stderr(self, line: bytes) -> None:
        self.tail.append(line.decode("utf-8", "replace").rstrip()[:500])
        self._write_log(line)

    def _on_stdout(self, line: bytes) -> None:
        self._write_log(line)
        _pass_on(_STDOUT, f"[rank {self.number}] ".encode() + line)

    def _write_log(self, line: bytes) -> None:
        if self._sink is None or self._sink.closed:
            return
        try:
            self._sink.write(line)
        except OSError:
            self._close()  # a full disk must not stop the run for its log

    def _close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def _drop(_: bytes) -> None:
    """What is not shown as it comes: it is in the log and the tail."""


def _pass_on(descriptor: int, piece: bytes) -> None:
    try:
        while piece:
            piece = piece[os.write(descriptor, piece) :]
    except OSError:
        return  # our reader has gone; the run goes on


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a child does before it becomes the rank: ask the kernel to be killed when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return before_exec
