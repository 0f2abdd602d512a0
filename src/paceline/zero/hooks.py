"""What happens around a unit's forward and backward: the only place that registers hooks.

Note [End of a unit's backward]
-------------------------------
A unit's inputs pass through an identity node. Autograd runs ready nodes by descending sequence number and accumulates
leaf gradients as soon as they are complete, so when the identity node runs, every node of the unit's forward has run
and every gradient of the unit is there, including none at all for parameters that were not used. Counting hooks per
parameter would wait for ever for an unused one. Whatever has no such node (the root, units whose inputs need no
gradient) is collected when the whole backward ends.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import RunFailed
from paceline.zero import streams
from paceline.zero.precision import Precision
from paceline.zero.prefetch import Sweep
from paceline.zero.unit import Unit


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _AfterBackward(torch.autograd.Function):
    """Identity; its backward says that the unit's backward is done."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.done = done
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.done()
        return None, *gradients


class Passes:
    """The forward and backward passes over the units of one module.

    Args:
        units: blocks in module order; the order of execution is learnt in the first forward and agreed between ranks.
        root: the unit of everything else; held from the start of a forward to the end of its backward.
        agree: makes one list of unit indices of all ranks' observed orders (collective).
        reduce: a unit's gradients are complete; called in one order on all ranks.
        ended: a backward has ended.
        stream_key: (seed, step, micro-batch) of the micro-batch at work.
    """

    PREFETCH = 1

    def __init__(
        self,
        units: list[Unit],
        root: Unit,
        *,
        precision: Precision,
        device: torch.device,
        agree: Callable[[list[int]], list[int]],
        reduce: Callable[[Unit], None],
        ended: Callable[[], None],
        stream_key: Callable[[], tuple[int, ...]],
    ) -> None:
        self.root, self.order = root, list(units)
        self._by_index = {unit.index: unit for unit in units}
        self._reversed = self.order[::-1]
        self._agree, self._reduce, self._ended, self._stream_key = agree, reduce, ended, stream_key
        self._precision = precision
        self._streams = streams.Streams(device)
        self._users_stream: Any = None
        self._observed: list[int] | None = []
        self._arrived: deque[Unit] = deque()
        self._forward: Sweep[Unit] = Sweep(self._issue)
        self._backward: Sweep[Unit] = Sweep(self._issue)
        self._complete: set[int] = set()
        self._reductions = 0
        self._counting = self._began_backward = False

    # -- registration -------------------------------------------------------------------------------------------------

    def register(self, remat: bool) -> None:
        for unit in self.order:
            unit.module.register_forward_pre_hook(functools.partial(self._before_block, unit), with_kwargs=True)
            if remat:
                unit.module.forward = self._rematerialised(unit, unit.module.forward)
            unit.module.register_forward_hook(functools.partial(self._after_block, unit))
        module = self.root.module
        module.register_forward_pre_hook(self._before_root, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after_root)

    def _rematerialised(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Keeps a block's inputs only and runs its forward again, on the same random stream, in backward."""

        def run(key: int | None, *args: Any, **kwargs: Any) -> Any:
            if key is None or not _in_backward():
                return forward(*args, **kwargs)
            with self._streams.scope(key):
                return forward(*args, **kwargs)

        @functools.wraps(forward)
        def remat(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            key = self._key(unit, unit.begun) if unit.module.training else None
            return checkpoint(run, key, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return remat

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not _in_backward():
            self._began_backward = False
            self._counting = torch.is_grad_enabled()
            self.start_forward()
            self.root.begun += self._counting
            if module.training:
                self._users_stream = self._streams.state()
                self._streams.seed(self._key(self.root, self.root.begun))
        return self._precision.cast_inputs(args), self._precision.cast_inputs(kwargs)

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if _in_backward():
            return
        if self._users_stream is not None:
            self._streams.restore(self._users_stream)
            self._users_stream = None
        self.finish_forward()
        if not self._on_outputs(output, self.start_backward):
            self.root.release()

    def start_forward(self) -> None:
        self._forward.start(self.order)
        self.root.ready()

    def finish_forward(self) -> None:
        self._forward.finish()
        self._drop_arrived()
        if self._observed is not None and self._counting:
            observed, self._observed = self._observed, None
            order = self._agree(observed)
            self.order = [self._by_index[index] for index in order]
            self._reversed = self.order[::-1]

    def _before_block(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _in_backward():
            self._arrive(unit, self._backward)
        else:
            self._arrive(unit, self._forward)
            unit.begun += self._counting
            unit.uses += self._counting
            if self._observed is not None and unit.index not in self._observed:
                self._observed.append(unit.index)
            if module.training:
                self._streams.seed(self._key(unit, unit.begun))
        if not torch.is_grad_enabled():
            return None
        return self._on_backward_end(unit, args, kwargs)

    def _after_block(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        self._on_outputs(output, functools.partial(self._before_backward, unit))
        if not _in_backward():
            unit.release()

    def _key(self, unit: Unit, use: int) -> int:
        return streams.key(*self._stream_key(), unit.index, use)

    @staticmethod
    def _on_outputs(output: Any, call: Callable[[], None]) -> bool:
        """Calls before the backward of any of these outputs; False if none takes part in one."""
        tensors = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda gradient: call())
        return bool(tensors)

    def _on_backward_end(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        values, spec = pytree.tree_flatten((args, kwargs))
        at = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
        if not at:
            return None
        passed = _AfterBackward.apply(functools.partial(self._after_backward, unit), *(values[i] for i in at))
        for i, tensor in zip(at, passed, strict=True):
            values[i] = tensor
        return pytree.tree_unflatten(values, spec)

    # -- gathers in one order -----------------------------------------------------------------------------------------

    def _issue(self, unit: Unit) -> None:
        if not unit.held:
            unit.gather()
            self._arrived.append(unit)

    def _arrive(self, unit: Unit, sweep: Sweep[Unit]) -> None:
        """Makes `unit` ready, dropping what was gathered before it and not used here (Note [One order])."""
        sweep.reach(unit)
        while self._arrived and unit in self._arrived:
            first = self._arrived.popleft()
            if first is unit:
                break
            first.release()
        unit.ready()
        sweep.reach(unit, ahead=self.PREFETCH)

    def _drop_arrived(self) -> None:
        while self._arrived:
            self._arrived.popleft().release()

    # -- backward -----------------------------------------------------------------------------------------------------

    def start_backward(self) -> None:
        if self._began_backward:
            return
        self._began_backward = True
        self._backward.start(self._reversed)
        self._complete.clear()
        self._reductions = 0
        if _in_backward():
            Variable._execution_engine.queue_callback(self.finish_backward)

    def _before_backward(self, unit: Unit) -> None:
        self.start_backward()
        self._arrive(unit, self._backward)

    def _after_backward(self, unit: Unit) -> None:
        unit.release()
        unit.uses -= 1
        if unit.uses <= 0:
            self._complete.add(unit.index)
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Hands on gradients in the agreed order, as far as it is complete."""
        while self._reductions < len(self._reversed):
            unit = self._reversed[self._reductions]
            absent = unit.begun == 0 and unit.sharded
            if unit.index not in self._complete and not absent:
                return
            self._reductions += 1
            unit.reduced = True
            self._reduce(unit)

    def finish_backward(self) -> None:
        """The end of a micro-batch, also of one that this rank did not have."""
        self._backward.finish()
        self._drop_arrived()
        self._complete.update(self._by_index)
        self._reduce_complete()
        for unit in self.order:
            unit.release()
        self._reduce(self.root)
        self.root.release()
        self._refuse_late_gradients()
        for unit in (*self.order, self.root):
            unit.reset()
        self._began_backward = False
        self._ended()

    def _refuse_late_gradients(self) -> None:
        for unit in self.order:
            for name, parameter in unit.named():
                if parameter.grad is not None:
                    parameter.grad = None
                    raise RunFailed(
                        f"the gradient of {name!r} came after its unit {unit.name!r} had been reduced: the parameter is "
                        f"used by a second, separately recomputed part of the model. Recompute it in one piece "
                        f"(checkpoint(..., use_reentrant=False), or remat='full'), or name both parts in one unit."
                    )

    def skip(self, backward: bool) -> None:
        """Joins the others' forward, and backward, without a micro-batch."""
        self._counting = backward
        self.start_forward()
        self.finish_forward()
        if backward:
            self._began_backward = False
            self.start_backward()
            self.finish_backward()
        else:
            self.root.release()
