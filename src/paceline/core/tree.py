"""The canonical summation tree over global micro-batches.

Note [One tree]
---------------
Floating-point addition is not associative, so "the sum of the micro-batch gradients" is only defined once an order is.
Ours belongs to the data: micro-batches are numbered 0..M-1 over all ranks, and the sum is the one that a binary counter
makes when it reads the leaves in order (equal neighbours merge; what is left is folded from the right). Every aligned
subtree `[i * 2**l, (i+1) * 2**l)` may be summed anywhere, by anyone, at any time: the result has the same bits. A rank
therefore adds its own aligned subtrees, sends the partial sums to the owner, and the owner finishes the tree; neither
the world size nor the accumulation schedule is visible in the result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Total = TypeVar("Total")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The subtree over leaves `[start, start + 2**level)`; `start` is a multiple of `2**level`."""

    start: int
    level: int

    @property
    def stop(self) -> int:
        return self.start + (1 << self.level)


def forest(start: int, stop: int) -> list[Node]:
    """The fewest aligned subtrees that cover leaves `[start, stop)`, left to right."""
    nodes: list[Node] = []
    while start < stop:
        level = (start & -start).bit_length() - 1 if start else (stop - start).bit_length() - 1
        while start + (1 << level) > stop:
            level -= 1
        nodes.append(Node(start, level))
        start += 1 << level
    return nodes


class Counter(Generic[Total, Part]):
    """A binary counter of partial sums, read from the left.

    `copy(part)` starts a total, `add(total, part)` adds a part that comes in, `merge(total, right)` adds the total of
    the right neighbour and gives its buffer back. A part that has its sibling waiting is added without being copied.
    """

    def __init__(
        self, copy: Callable[[Part], Total], add: Callable[[Total, Part], None], merge: Callable[[Total, Total], None]
    ) -> None:
        self._copy, self._add, self._merge = copy, add, merge
        self.stack: list[tuple[Node, Total]] = []

    def __len__(self) -> int:
        return len(self.stack)

    def _is_sibling(self, node: Node) -> bool:
        if not self.stack or not node.start & (1 << node.level):
            return False
        left = self.stack[-1][0]
        return left.level == node.level and left.stop == node.start

    def push(self, node: Node, part: Part) -> None:
        """Takes the sum of the leaves under `node`; nodes come in order, from the left."""
        if self._is_sibling(node):
            left, total = self.stack.pop()
            self._add(total, part)
            node = Node(left.start, left.level + 1)
        else:
            total = self._copy(part)
        while self._is_sibling(node):
            left, right = self.stack.pop(), total
            total = left[1]
            self._merge(total, right)
            node = Node(left[0].start, node.level + 1)
        self.stack.append((node, total))

    def fold(self) -> Total | None:
        """Adds what is left from the right and empties the counter; None if nothing was pushed."""
        if not self.stack:
            return None
        total = self.stack.pop()[1]
        while self.stack:
            right, total = total, self.stack.pop()[1]
            self._merge(total, right)
        return total


def most_held(rounds: Sequence[Iterable[tuple[int, int]]], units: int, left: int | None = None) -> int:
    """The most totals that `units` counters hold together when each round of spans reaches them one after the other.

    `left`: how many a unit keeps when the last round has reached it; None: all that its counter then holds.

    It is the number of buffers that a schedule needs, so a plan can count them without running it.
    """
    counter: Counter[None, None] = Counter(lambda part: None, lambda total, part: None, lambda total, right: None)
    most = rest = 0
    for number, spans in enumerate(rounds, 1):
        high = rest
        for start, stop in spans:
            for node in forest(start, stop):
                counter.push(node, None)
                high = max(high, len(counter))
        after = len(counter) if left is None or number < len(rounds) else left
        most = max(most, (units - 1) * max(rest, after) + high)
        rest = after
    return most
