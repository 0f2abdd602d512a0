"""Paceline: train PyTorch models with ZeRO on anything from a laptop to a cluster.

Names are loaded when they are first used, so that `paceline --help` never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint import load as load
    from paceline.checkpoint import save as save
    from paceline.mesh import Mesh as Mesh
    from paceline.mesh import init as init
    from paceline.zero import Engine as Engine
    from paceline.zero import Optimizer as Optimizer
    from paceline.zero import StepReport as StepReport
    from paceline.zero import shard as shard

__version__ = "0.1.0"

_HOMES = {
    "Engine": "paceline.zero",
    "Mesh": "paceline.mesh",
    "Optimizer": "paceline.zero",
    "StepReport": "paceline.zero",
    "init": "paceline.mesh",
    "load": "paceline.checkpoint",
    "save": "paceline.checkpoint",
    "shard": "paceline.zero",
}

__all__ = ["Engine", "Mesh", "Optimizer", "StepReport", "init", "load", "save", "shard"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
