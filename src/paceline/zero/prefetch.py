"""Issues collectives in one order that all ranks share, whatever each of them happens to execute.

Note [One order]
----------------
Collectives pair up by the order in which ranks issue them. If a rank skips a layer that another executes, an order of
"whenever a module runs" pairs different layers with each other: a hang, or wrong numbers when the shapes agree. So each
sweep over the units (forward gathers, backward gathers, reductions) has one agreed order, and a rank that needs unit k
first issues everything before k. What it does not need is dropped as soon as it has arrived. Skipping a layer costs the
traffic it would have cost anyway and the result is the reference's.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


class Sweep(Generic[Unit]):
    """A cursor over an agreed order. `issue(unit)` is called exactly once for each unit, in order."""

    def __init__(self, issue: Callable[[Unit], None]) -> None:
        self._issue = issue
        self._order: Sequence[Unit] = ()
        self._place: dict[int, int] = {}
        self.position = 0

    def start(self, order: Sequence[Unit]) -> None:
        if order is not self._order:
            self._order, self._place = order, {id(unit): i for i, unit in enumerate(order)}
        self.position = 0

    def reach(self, unit: Unit, ahead: int = 0) -> None:
        """Issues all units up to `unit` and `ahead` more."""
        self._advance(self._place[id(unit)] + 1 + ahead)

    def finish(self) -> None:
        self._advance(len(self._order))

    def _advance(self, until: int) -> None:
        while self.position < min(until, len(self._order)):
            unit = self._order[self.position]
            self.position += 1
            self._issue(unit)
