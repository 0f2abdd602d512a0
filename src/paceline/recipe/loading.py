"""From a file and overrides to a Recipe; all that is wrong is said at once, each with its place."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from paceline.core.errors import InputError
from paceline.recipe.complaints import complaints_of
from paceline.recipe.schema import Recipe
from paceline.recipe.source import Tree, read_file, read_value

__all__ = ["from_dict", "load"]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply overrides such as `optim.lr=1e-3`, and check the whole.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value`, the value in YAML; later ones win.

    Returns:
        the recipe; `recipe.origin("optim.lr")` says where a value comes from.

    Raises:
        InputError: the file, an override or a value is wrong; every fault found is listed, one a line.
    """
    tree = read_file(Path(path), str(path))
    for override in overrides:
        _apply(override, tree)
    return _validated(tree, str(path))


def from_dict(data: Mapping[str, Any], place: str = "recipe") -> Recipe:
    """Check plain data, such as what `recipe.as_dict()` gave; `place` names it in errors and origins.

    Raises:
        InputError: something in it is wrong.
    """
    tree = Tree(dict(data))
    _note_places(tree, data, "", place)
    return _validated(tree, place)


def _validated(tree: Tree, shown: str) -> Recipe:
    complaints = list(tree.complaints)
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(tree.data, context=tree.places)
    except ValidationError as error:
        complaints += complaints_of(error, tree, shown)
    if recipe is None or complaints:
        lines = sorted(dict.fromkeys(complaints), key=_line_number)
        head = f"{shown} has {len(lines)} errors:\n" if len(lines) > 1 else ""
        raise InputError(head + "\n".join(lines))
    return recipe


def _line_number(complaint: str) -> int:
    """The line a complaint points at, so that a reader can go through the file downwards; overrides come last."""
    match = re.match(r".*?:(\d+): ", complaint)
    return int(match.group(1)) if match and not complaint.startswith("override") else sys.maxsize


def _apply(override: str, tree: Tree) -> None:
    key, equals, text = override.partition("=")
    place = f"override {override!r}"
    parts = key.strip().split(".")
    if not equals or not all(parts):
        tree.complaints.append(f"{place}: an override is written key=value, such as optim.lr=1e-3.")
        return
    try:
        value = read_value(text, place)
    except InputError as error:
        tree.complaints.append(str(error))
        return
    here: dict[str, Any] = tree.data
    for depth, part in enumerate(parts[:-1], start=1):
        below = here.get(part)
        if below is None or (below == "auto" and part == "parallel"):
            below = {}
        if not isinstance(below, dict):
            tree.complaints.append(
                f"{place}: {'.'.join(parts[:depth])} is the value {below!r}, it has no keys below it."
            )
            return
        # A copy: the mapping may be shared with another key through a YAML alias.
        here[part] = dict(cast("dict[str, Any]", below))
        here = here[part]
        tree.places.setdefault(".".join(parts[:depth]), place)
    here[parts[-1]] = value
    dotted = ".".join(parts)
    for old in [name for name in tree.places if name == dotted or name.startswith(f"{dotted}.")]:
        del tree.places[old]
    tree.places[dotted] = place
    _note_places(tree, value, dotted, place)


def _note_places(tree: Tree, value: Any, dotted: str, place: str) -> None:
    if isinstance(value, Mapping):
        for key, below in cast("Mapping[str, Any]", value).items():
            name = f"{dotted}.{key}" if dotted else key
            tree.places[name] = place
            _note_places(tree, below, name, place)
