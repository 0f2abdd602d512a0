"""The typed recipe: what to train, in global quantities, read strictly from YAML. Loads no torch."""

from paceline.recipe.loading import from_dict, load
from paceline.recipe.names import Key, known_keys
from paceline.recipe.schema import (
    DataSection,
    DecoderModel,
    OptimSection,
    ParallelSection,
    Recipe,
    RunSection,
    Schedule,
    TargetModel,
    TaskSection,
    TokenizerSection,
)

__all__ = [
    "DataSection",
    "DecoderModel",
    "Key",
    "OptimSection",
    "ParallelSection",
    "Recipe",
    "RunSection",
    "Schedule",
    "TargetModel",
    "TaskSection",
    "TokenizerSection",
    "from_dict",
    "known_keys",
    "load",
]
