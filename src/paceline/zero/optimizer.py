"""Any elementwise torch optimizer over the flat shards."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.errors import InputError
from paceline.zero.unit import FlatGroup, Unit

Groups = Sequence[Mapping[str, Any]] | Callable[[str, nn.Parameter], Mapping[str, Any]]
Options = tuple[tuple[str, Any], ...]
WHOLE_MATRIX = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


@dataclass(frozen=True)
class Segment:
    """Elements `[start, stop)` of a group's master shard, all with the same options; `value` is what torch updates."""

    group: FlatGroup
    start: int
    stop: int
    value: torch.Tensor


class Segments:
    """A torch optimizer over a few flat tensors a unit, so that a step is a few fused kernels.

    Args:
        factory: the optimizer class, `torch.optim.AdamW` for instance; its arithmetic must be elementwise.
        groups: `{"match": regex over parameter names, **options}` each, the first match wins; or a function of
            (name, parameter) that returns options.
        defaults: the class's own arguments. `fused=True` is added where the class knows it.
    """

    def __init__(
        self, units: Sequence[Unit], shard: int, factory: type[torch.optim.Optimizer], groups: Groups | None,
        defaults: dict[str, Any],
    ) -> None:  # fmt: skip
        if factory.__name__ in WHOLE_MATRIX:
            raise InputError(
                f"optimizer {factory.__name__} works on whole matrices, but here each rank updates a flat shard of them; "
                f"choose an elementwise one such as torch.optim.AdamW, SGD, RMSprop or Adagrad."
            )
        arguments = inspect.signature(factory).parameters
        if "fused" in arguments and not {"fused", "foreach", "capturable", "differentiable"} & defaults.keys():
            defaults = {**defaults, "fused": True}
        self.segments: list[Segment] = []
        options: dict[Options, list[torch.Tensor]] = {}
        for unit in units:
            for group in unit.trainable:
                keys = _keys(group, groups)
                for key in keys.values():
                    options.setdefault(key, [])  # in parameter order, so that all ranks have the same param_groups
                for key, start, stop in _runs(group, shard, keys):
                    assert group.master is not None
                    segment = Segment(group, start, stop, group.master[start:stop].detach())
                    self.segments.append(segment)
                    options[key].append(segment.value)
        self.torch: torch.optim.Optimizer | None = None
        if options:
            rows = [{"params": values, **dict(key)} for key, values in options.items()]
            self.torch = factory(rows, **defaults)  # type: ignore[call-arg]
        self.name = factory.__name__
        self._idle_groups = [{**defaults, "params": []}]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.torch.param_groups if self.torch is not None else self._idle_groups

    def step(self, totals: Mapping[int, torch.Tensor]) -> None:
        """One update from the groups' gradient shards, by `id(group)`."""
        if self.torch is None:
            return
        for segment in self.segments:
            segment.value.grad = totals[id(segment.group)][segment.start : segment.stop]
        self.torch.step()
        for segment in self.segments:
            segment.value.grad = None
        self._refuse_foreign_state()

    def _refuse_foreign_state(self) -> None:
        for segment in self.segments[:1]:
            for name, value in self.states(segment).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != segment.value.shape:
                    raise InputError(
                        f"optimizer {self.name} keeps state {name!r} of shape {tuple(value.shape)} for a flat shard of "
                        f"{segment.value.numel()} elements: it is not elementwise, so it can't run on shards."
                    )

    def states(self, segment: Segment) -> dict[str, Any]:
        return self.torch.state.get(segment.value, {}) if self.torch is not None else {}

    @property
    def state_bytes(self) -> int:
        """Bytes of the state tensors that are as large as their segment."""
        found = (v for s in self.segments for v in self.states(s).values())
        return sum(v.untyped_storage().nbytes() for v in found if isinstance(v, torch.Tensor) and v.dim())


def _keys(group: FlatGroup, groups: Groups | None) -> dict[str, Options]:
    pairs = zip(group.names, group.parameters, strict=True)
    return {name: tuple(sorted(_options(name, parameter, groups).items())) for name, parameter in pairs}


def _runs(group: FlatGroup, shard: int, keys: Mapping[str, Options]) -> list[tuple[Options, int, int]]:
    """(options, start, stop) of each run of neighbours with equal options.

    Together they cover the shard: the zeros between and behind parameters belong to the run before them and stay zero.
    """
    runs: list[tuple[Options, int, int]] = []
    for part in group.layout.intervals(shard):
        key = keys[part.slot.name]
        if not runs or runs[-1][0] != key:
            runs.append((key, part.at, 0))
    runs = runs or [(keys[group.names[-1]], 0, 0)]
    starts = [0, *(start for _, start, _ in runs[1:]), group.layout.shard_numel]
    return [(key, starts[i], starts[i + 1]) for i, (key, _, _) in enumerate(runs)]


def _options(name: str, parameter: nn.Parameter, groups: Groups | None) -> dict[str, Any]:
    if groups is None:
        return {}
    if callable(groups):
        return dict(groups(name, parameter))
    for group in groups:
        if "match" not in group:
            raise InputError(f"optimizer group {dict(group)!r} has no 'match': give a regular expression over names.")
        if re.search(group["match"], name):
            return {k: v for k, v in group.items() if k != "match"}
    return {}
