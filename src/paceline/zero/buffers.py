"""Reusable buffers: every step takes the same ones in the same order, so their memory is known in advance."""

from collections.abc import Hashable, Sequence

import torch

from paceline.core.layout import FlatLayout


class Pool:
    """Flat buffers of one size. The gaps between parameters are zero in each and are never written."""

    def __init__(self, layout: FlatLayout, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._numel, self.dtype, self._device = layout, numel, dtype, device
        self._free: list[torch.Tensor] = []
        self._alive = self._most = 0

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self._alive += 1
        self._most = max(self._most, self._alive)
        buffer = torch.empty(self._numel, dtype=self.dtype, device=self._device)
        if self._numel == self._layout.padded:
            for start, stop in self._layout.gaps():
                buffer[start:stop].zero_()
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def trim(self) -> None:
        self._alive -= len(self._free)
        self._free.clear()

    @property
    def bytes(self) -> int:
        """Bytes of the most buffers that there were at one time."""
        return self._most * self._numel * self.dtype.itemsize


class Pools:
    """Pools by purpose. Units of the same layout share one, so a deep model needs no more of them than a shallow one.

    The key holds the layout's offsets, since a buffer may only ever be reused under the same gaps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[tuple[str, Hashable, int, torch.dtype], Pool] = {}

    def of(self, purpose: str, layout: FlatLayout, numel: int, dtype: torch.dtype) -> Pool:
        key = (purpose, layout.pattern, numel, dtype)
        if key not in self._pools:
            self._pools[key] = Pool(layout, numel, dtype, self.device)
        return self._pools[key]

    def trim(self) -> None:
        """Between steps: the peak of a step is in the loss, before any gradient exists, so its buffers lend their memory."""
        for pool in self._pools.values():
            pool.trim()

    def bytes(self, purpose: str) -> int:
        return sum(pool.bytes for (what, *_), pool in self._pools.items() if what == purpose)


def views(flat: torch.Tensor, layout: FlatLayout) -> Sequence[torch.Tensor]:
    """The parameters' views of a whole flat buffer, in their shapes."""
    return [flat[s.offset : s.offset + s.numel].view(s.shape) for s in layout.slots]
