"""The collectives that the engine needs, each on flat contiguous buffers and without a copy of ours.

torch is renaming these calls (2.13 deprecates `all_gather_into_tensor`); this file is the one place that knows.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


class Pending:
    """A collective in flight. `wait()` returns when its output may be used; waiting twice is allowed."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work | None = None) -> None:
        self._work = work

    @property
    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()


DONE = Pending()


def all_gather(output: torch.Tensor, own: torch.Tensor, group: Group | None) -> Pending:
    """`output` [n * k] receives each rank's `own` [k] in rank order. `own` may be this rank's slice of `output`."""
    if group is None:
        if own.data_ptr() != output.data_ptr():
            output.copy_(own)
        return DONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Pending(dist.all_gather_into_tensor(output, own, group=group, async_op=True))


def all_to_all(
    output: torch.Tensor, source: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: Group | None
) -> Pending:
    """Sends `send[j]` elements of `source` to rank j; `output` receives `receive[i]` elements from each rank i."""
    if group is None:
        output.copy_(source)
        return DONE
    work = dist.all_to_all_single(output, source, list(receive), list(send), group=group, async_op=True)
    return Pending(work)
