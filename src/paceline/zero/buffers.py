"""Reusable buffers: a step takes from the same pools every time, so memory is known in advance and never faulted in twice."""

from collections.abc import Hashable, Sequence

import torch

from paceline.core.layout import FlatLayout


class Pool:
    """Flat buffers of one size. New ones are zero; a buffer that comes back keeps its contents."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self.made = 0
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self.made += 1
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    @property
    def bytes(self) -> int:
        return self.made * self.numel * self.dtype.itemsize


class Pools:
    """Pools by purpose. Units of the same layout share one, so a deep model needs no more of them than a shallow one.

    The key holds the layout's offsets: the gaps between parameters are zero in a fresh buffer and are never written, so
    a buffer may only ever be reused under the same layout.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[tuple[str, Hashable, int, torch.dtype], Pool] = {}

    def of(self, purpose: str, layout: FlatLayout, numel: int, dtype: torch.dtype) -> Pool:
        key = (purpose, layout.pattern, numel, dtype)
        if key not in self._pools:
            self._pools[key] = Pool(numel, dtype, self.device)
        return self._pools[key]

    def bytes(self, purpose: str) -> int:
        return sum(pool.bytes for (what, *_), pool in self._pools.items() if what == purpose)


def views(flat: torch.Tensor, layout: FlatLayout) -> Sequence[torch.Tensor]:
    """The parameters' views of a whole flat buffer, in their shapes."""
    return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in layout.slots]
