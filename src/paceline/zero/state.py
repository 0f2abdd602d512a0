"""The engine's state as named pieces: what a checkpoint writes and reads, blind to stage and world size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import InputError
from paceline.zero.optimizer import Segment, Segments
from paceline.zero.unit import FlatGroup

if TYPE_CHECKING:
    from paceline.zero.engine import Engine

Fetch = Callable[[str, str, int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, stop)` of one flattened tensor.

    Attributes:
        kind: "master" (a trainable value, f32 or wider), "param" (a frozen value in its own dtype), "buffer" (a
            persistent buffer of the module), or the name of an optimizer state ("exp_avg").
        name: canonical parameter or buffer name.
        shape: of the whole tensor.
        tensor: 1-D contiguous view of those elements; copying into it loads them.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor


def pieces(engine: "Engine", *, owned: bool) -> list[Piece]:
    """This rank's pieces. With `owned`, each element of the run is on exactly one rank; else all that a rank needs."""
    found: list[Piece] = []
    plane = engine.plane
    if plane.replica == 0 or not owned:
        for unit in engine.units:
            for group in unit.groups:
                found += _group_pieces(group, plane.shard)
        optimizer = engine.segments
        if optimizer is not None:
            for segment in optimizer.segments:
                found += _state_pieces(optimizer, segment, plane.shard)
    if engine.mesh.is_main or not owned:
        for name, buffer in engine.persistent_buffers():
            found.append(Piece("buffer", name, tuple(buffer.shape), 0, buffer.numel(), buffer.view(-1)))
    return found


def _group_pieces(group: FlatGroup, shard: int) -> Iterator[Piece]:
    kind = "master" if group.trainable else "param"
    for part in group.layout.intervals(shard):
        tensor = group.source[part.at : part.at + part.stop - part.start]
        yield Piece(kind, part.slot.name, part.slot.shape, part.start, part.stop, tensor)


def _state_pieces(optimizer: Segments, segment: Segment, shard: int) -> Iterator[Piece]:
    tensors = {k: v for k, v in optimizer.states(segment).items() if isinstance(v, torch.Tensor) and v.dim()}
    for part in segment.group.layout.intervals(shard):
        low = part.at - segment.start
        if not 0 <= low < segment.stop - segment.start:
            continue
        for name, tensor in tensors.items():
            view = tensor[low : low + part.stop - part.start]
            yield Piece(name, part.slot.name, part.slot.shape, part.start, part.stop, view)


def scalars(engine: "Engine") -> dict[str, Any]:
    """What is not a tensor, ready for JSON, equal on all ranks."""
    out: dict[str, Any] = {
        "step": engine.step, "seed": engine.seed, "precision": engine.precision.name, "ties": engine.ties,
    }  # fmt: skip
    optimizer = engine.segments
    if optimizer is not None and optimizer.torch is not None:
        states = optimizer.states(optimizer.segments[0])
        tensors = {k: str(v.dtype).removeprefix("torch.") for k, v in states.items() if _is_elementwise(v)}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        out["optimizer"] = {
            "class": optimizer.name,
            "states": tensors,
            "scalars": {k: float(v) for k, v in states.items() if k not in tensors and v is not None},
            "groups": groups,
        }
    return out


def _is_elementwise(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def load(engine: "Engine", saved: dict[str, Any], fetch: Fetch) -> None:
    """Fills the engine from `fetch(kind, name, start, stop)` and publishes the values. Collective."""
    optimizer = engine.segments
    if optimizer is not None and optimizer.torch is not None:
        _make_states(optimizer, saved.get("optimizer"))
    engine.settle_all()
    for piece in pieces(engine, owned=False):
        piece.tensor.copy_(fetch(piece.kind, piece.name, piece.start, piece.stop))
    engine.step = int(saved["step"])
    engine.publish_all(frozen=True)


def _make_states(optimizer: Segments, saved: dict[str, Any] | None) -> None:
    if saved is None:
        raise InputError(
            "the checkpoint holds no optimizer state, but this run has an optimizer: load it before "
            "`engine.optimizer(...)` to start from its weights only."
        )
    if saved["class"] != optimizer.name:
        raise InputError(
            f"the checkpoint was written with optimizer {saved['class']}, this run has {optimizer.name}: their states "
            f"differ. Choose {saved['class']}, or load before `engine.optimizer(...)` to take the weights only."
        )
    assert optimizer.torch is not None
    for segment in optimizer.segments:
        state = optimizer.torch.state[segment.value]
        for name, dtype in saved["states"].items():
            state[name] = torch.zeros_like(segment.value, dtype=getattr(torch, dtype))
        for name, value in saved["scalars"].items():
            state[name] = torch.tensor(value, dtype=torch.float32)
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=False):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in group})
