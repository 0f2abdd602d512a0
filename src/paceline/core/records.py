"""What a run reports: frozen records, one kind a class, ready for JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Record:
    """Base of all records; `as_dict` adds the kind."""

    kind: ClassVar[str] = "record"

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepRecord(Record):
    """One optimizer step: mean loss per counted token, norm before clipping, tokens of the whole step, rank 0's memory."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_total: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class EvalRecord(Record):
    """Mean loss per counted token over the whole evaluation split."""

    kind: ClassVar[str] = "eval"
    step: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveRecord(Record):
    """A checkpoint was committed."""

    kind: ClassVar[str] = "save"
    step: int
    path: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanRecord(Record):
    """The resolved settings: name -> {"value": ..., "reason": ...}."""

    kind: ClassVar[str] = "plan"
    settings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


@dataclass(frozen=True, slots=True)
class RunRecord(Record):
    """Start, resume, end or interruption of a run."""

    kind: ClassVar[str] = "run"
    event: str
    step: int
    detail: dict[str, Any] = field(default_factory=dict[str, Any])
