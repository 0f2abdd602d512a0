"""Random numbers that belong to the data: keyed by (seed, step, micro-batch, unit, use), not by rank or history."""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def key(*parts: int) -> int:
    """63 bits that depend on all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Streams:
    """Seeds the default generators for one unit at a time, and hands the caller's own stream back."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        if self._cuda is not None:
            torch.cuda.manual_seed(value)

    def state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def restore(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._cuda or "cuda")

    @contextlib.contextmanager
    def scope(self, value: int) -> Iterator[None]:
        state = self.state()
        self.seed(value)
        try:
            yield
        finally:
            self.restore(state)
