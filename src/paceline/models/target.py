"""A user's own module: `package.module:name` or `file.py:name`, called with keyword arguments."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from paceline.core.errors import InputError


def build(target: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Calls the target; InputError says what is wrong with it."""
    where, _, name = target.partition(":")
    module = _load(where, target)
    maker = getattr(module, name, None)
    if maker is None:
        raise InputError(f"model.target {target!r}: {where} has no {name!r}.")
    try:
        made = maker(**arguments)
    except TypeError as error:
        raise InputError(f"model.target {target!r} does not take these model.arguments: {error}.") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"model.target {target!r} returned {type(made).__name__}: it must return a torch.nn.Module.")
    return made


def _load(where: str, target: str) -> ModuleType:
    if where.endswith(".py"):
        path = Path(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.exists() or spec is None or spec.loader is None:
            raise InputError(f"model.target {target!r}: there is no file {where}.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise InputError(f"model.target {target!r}: {error}; is it installed, or on PYTHONPATH?") from error
