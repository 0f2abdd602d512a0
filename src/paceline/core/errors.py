"""The errors a user may meet: each is one paragraph that names the value, the rule it broke and the remedy.

The class decides the exit code of the program, so a script around `paceline train` can tell a wrong recipe (2) from a
machine that is too small (3) and from a run that was asked to stop and can go on (75). An `assert` is for our own mistakes.
"""

import difflib
from collections.abc import Iterable

__all__ = ["DoesNotFit", "InputError", "Interrupted", "PacelineError", "RunFailed", "nearest_name"]


class PacelineError(Exception):
    """Base of all errors meant for the user's eyes.

    Args:
        message: one paragraph: the value, the rule it broke, what to do about it.

    Attributes:
        exit_code: what the program exits with when this error ends it.
    """

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RunFailed(PacelineError):
    """The input was right, but the run broke: a rank died, the loss is not finite, a disk is full."""

    exit_code = 1


class InputError(PacelineError):
    """What was given is wrong: a recipe, a file, a checkpoint, a port in use, fewer ranks than asked for."""

    exit_code = 2


class DoesNotFit(PacelineError):
    """The model and its batch need more memory than the machine has."""

    exit_code = 3


class Interrupted(PacelineError):
    """SIGTERM or Ctrl-C ended the run after its state was saved: the same command resumes it."""

    exit_code = 75


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt `name` most likely stands for, or None if none is near."""
    by_folded = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), list(by_folded), n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None
