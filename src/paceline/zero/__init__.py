"""The ZeRO engine: units, five verbs, one table of stages."""

from paceline.zero.engine import Engine, Optimizer, StepReport
from paceline.zero.shard import shard
from paceline.zero.state import Piece

__all__ = ["Engine", "Optimizer", "Piece", "StepReport", "shard"]
