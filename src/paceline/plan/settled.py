"""The plan: every setting with its value and its reason; stored as JSON in the run directory."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from paceline.core.errors import InputError
from paceline.core.quantity import parse

__all__ = ["Plan", "Setting"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and why it is that value."""

    value: int | str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe becomes on a world of ranks.

    Attributes:
        world: ranks.
        world_source: how the world was found.
        settings: by the recipe's dotted keys; `optim.global_batch` is in whole sequences (`64seq`).
        memory: bytes on one rank by category (weights, gradients, master, moments, gather, activations, base).
        memory_available: bytes one rank may use.
    """

    world: int
    world_source: str
    settings: Mapping[str, Setting]
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    memory_available: int = 0

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._whole("parallel.stage")

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward; part of the run's identity."""
        return self._whole("parallel.micro_batch")

    @property
    def accumulation(self) -> int:
        """Micro-batches of the busiest rank in one optimizer step."""
        return self._whole("parallel.accumulation")

    @property
    def replicate(self) -> int:
        """Groups of ranks that each hold all shards."""
        return self._whole("parallel.replicate")

    @property
    def shard(self) -> int:
        """Ranks that share one set of shards."""
        return self.world // self.replicate

    @property
    def global_sequences(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return parse(str(self.settings["optim.global_batch"].value)).whole

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step over all ranks."""
        return self.global_sequences // self.micro_batch

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return str(self.settings["precision"].value)

    @property
    def remat(self) -> str:
        """none or full."""
        return str(self.settings["parallel.remat"].value)

    def _whole(self, key: str) -> int:
        value = self.settings[key].value
        assert isinstance(value, int), (key, value)
        return value

    def settings_dict(self) -> dict[str, dict[str, int | str]]:
        """Return `{key: {"value": ..., "reason": ...}}`, as records and logs want it."""
        return {key: {"value": item.value, "reason": item.reason} for key, item in self.settings.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-able data."""
        return {
            "format": _FORMAT,
            "world": self.world,
            "world_source": self.world_source,
            "settings": self.settings_dict(),
            "memory": dict(self.memory),
            "memory_available": self.memory_available,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `as_dict` gave.

        Raises:
            InputError: it is not a plan of this format.
        """
        if data.get("format") != _FORMAT:
            raise InputError(
                f"The plan has format {data.get('format')!r}, this version of Paceline reads format {_FORMAT}."
            )
        try:
            return cls(
                world=int(data["world"]),
                world_source=str(data["world_source"]),
                settings={key: Setting(item["value"], item["reason"]) for key, item in data["settings"].items()},
                memory={key: int(size) for key, size in data["memory"].items()},
                memory_available=int(data["memory_available"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"The plan is damaged ({type(error).__name__}: {error}): restore or delete it.") from None

    def save(self, path: Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a stored plan.

        Raises:
            InputError: it is missing or damaged; the message names the file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"The plan {path} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise InputError(f"The plan {path} is not JSON ({error}): restore or delete it.") from None
        if not isinstance(data, dict):
            raise InputError(f"The plan {path} holds no mapping: restore or delete it.")
        try:
            return cls.from_dict(cast("dict[str, Any]", data))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
