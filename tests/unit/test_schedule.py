"""Learning rates, leaves and the tree: pure functions."""

import pytest

from paceline.core.errors import InputError
from paceline.core.layout import BLOCK, FlatLayout
from paceline.core.tree import Counter, Node, forest
from paceline.train.schedule import Schedule
from paceline.zero.schedule import Window


def test_I66_linear_is_half_way_at_half_time():
    """A function of the optimizer step alone: ranks and accumulation can't be seen in it."""
    schedule = Schedule(shape="linear", steps=100)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(50) == 0.5
    assert schedule.factor(100) == 0.0


def test_I61_lr_needs_no_state():
    schedule = Schedule(shape="cosine", steps=50, warmup=5, final=0.1)
    assert [schedule.factor(k) for k in range(20, 50)] == [
        Schedule(shape="cosine", steps=50, warmup=5, final=0.1).factor(k) for k in range(20, 50)
    ]
    assert schedule.factor(0) == pytest.approx(0.2)
    assert schedule.factor(4) == schedule.factor(5) == 1.0
    assert schedule.factor(50) == pytest.approx(0.1)


def test_wsd_stays_then_falls():
    schedule = Schedule(shape="wsd", steps=100, warmup=10, decay=20, final=0.0)
    assert schedule.factor(9) == schedule.factor(79) == 1.0
    assert schedule.factor(90) == 0.5
    with pytest.raises(InputError, match="cosine"):
        Schedule(shape="cosin", steps=3)


def text_tree(spans):
    def add(total, part):
        total[0] = f"({total[0]}+{part})"

    def leaf_sum(node):
        inner = Counter(lambda p: [p], add, lambda t, r: add(t, r[0]))
        for i in range(node.start, node.stop):
            inner.push(Node(i, 0), str(i))
        return inner.stack[0][1][0]

    counter = Counter(lambda p: [p], add, lambda t, r: add(t, r[0]))
    for span in spans:
        for node in forest(*span):
            counter.push(node, leaf_sum(node))
    return counter.fold()[0]


@pytest.mark.parametrize("total", [1, 2, 3, 5, 8, 12, 13])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("local", [False, True])
def test_the_tree_is_the_same_for_every_world_and_schedule(total, world, local):
    window = Window.of(total, world, local)
    spans = [window.span(rank, k) for k in range(window.rounds) for rank in range(world)]
    assert text_tree(spans) == text_tree([(i, i + 1) for i in range(total)])
    assert sorted(leaf for rank in range(world) for leaf in window.leaves(rank)) == list(range(total))


def test_shards_are_whole_blocks_that_cover_every_element_once():
    shapes = [("a", (70, 70)), ("b", (3,)), ("c", ()), ("d", (0, 4)), ("e", (5000,))]
    for shards in (1, 2, 3, 5):
        layout = FlatLayout.of(shapes, shards)
        assert layout.shard_numel % BLOCK == 0
        covered = {name: [] for name, _ in shapes}
        for shard in range(shards):
            for part in layout.intervals(shard):
                covered[part.slot.name] += range(part.start, part.stop)
        assert all(covered[slot.name] == list(range(slot.numel)) for slot in layout.slots)
