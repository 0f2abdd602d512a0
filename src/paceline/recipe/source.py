"""YAML to plain data that remembers, for each key, the line it came from.

Scalars are read as YAML 1.2 does, not 1.1: `3e-4` is a number, `no`, `on` and `1:30` are texts, and there are no dates.
A key said twice, a tag, and an alias that contains itself are errors: nothing is dropped without a word.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from paceline.core.errors import InputError, nearest_name

__all__ = ["Tree", "read_file", "read_value"]

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
_MOST_NODES = 100_000


@dataclass(slots=True)
class Tree:
    """Plain data, where each dotted key of it stands, and what is wrong with it so far."""

    data: Any
    places: dict[str, str] = field(default_factory=dict[str, str])
    complaints: list[str] = field(default_factory=list[str])


def read_file(path: Path, shown: str | None = None) -> Tree:
    """Read a YAML file; places read `file:line`.

    Args:
        path: the file.
        shown: how messages name it; as given by default.

    Raises:
        InputError: the file is missing, unreadable, empty, not UTF-8, not YAML, or holds no mapping.
    """
    shown = shown or str(path)
    tree = _read(_text_of(path, shown), shown)
    if tree.data is None:
        raise InputError(f"{shown} is empty: a recipe has the sections model, data, optim and run.")
    if not isinstance(tree.data, dict):
        raise InputError(
            f"{shown}:1: the file holds {_kind(tree.data)}, but a recipe is a mapping of sections such as `model:`."
        )
    return tree


def read_value(text: str, place: str) -> Any:
    """Read the value of an override; `place` names it in errors.

    Raises:
        InputError: it is not YAML.
    """
    tree = _read(text, place, with_lines=False)
    if tree.complaints:
        raise InputError("\n".join(tree.complaints))
    return tree.data


def _text_of(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = path.parent
        others = [other.name for other in folder.glob("*.y*ml")] if folder.is_dir() else []
        near = nearest_name(path.name, others)
        advice = f"did you mean {folder / near}?" if near else "check the path, it is relative to the current folder."
        raise InputError(f"There is no recipe file {shown}: {advice}") from None
    except IsADirectoryError:
        raise InputError(f"{shown} is a folder: name the recipe file in it.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{shown} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from None
    except OSError as error:
        raise InputError(f"{shown} cannot be read ({error.strerror}): check its permissions.") from None


def _read(text: str, shown: str, *, with_lines: bool = True) -> Tree:
    try:
        node = cast("yaml.Node | None", yaml.compose(text, Loader=yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark and with_lines else shown
        raise InputError(f"{place}: not valid YAML: {_plain_problem(error)}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{shown}: not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise InputError(f"{shown}: nested too deeply for a recipe: flatten it.") from None
    tree = Tree(None)
    if node is not None:
        tree.data = _Builder(tree, shown, with_lines).build(node, "", ())
    return tree


def _plain_problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        return "a tab is used for indentation: use spaces."
    if "expected a single document" in (error.context or ""):
        return "it holds a second document after `---`: a recipe is one document."
    if "mapping values are not allowed" in problem:
        return "a second `: ` on this line: put the value in quotes, or check the indentation."
    context = f" ({error.context})" if error.context else ""
    return f"{problem}{context}: check the indentation, quotes and brackets here."


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value!r}"


class _Builder:
    """Turns nodes into plain data; complaints and places go to the tree."""

    def __init__(self, tree: Tree, shown: str, with_lines: bool) -> None:
        self.tree = tree
        self.shown = shown
        self.with_lines = with_lines
        self.nodes = 0

    def build(self, node: yaml.Node, path: str, above: tuple[int, ...]) -> Any:
        self.nodes += 1
        if id(node) in above:
            raise InputError(f"{self.place(node)}: the alias here contains itself: write the value out.")
        if self.nodes > _MOST_NODES:
            raise InputError(
                f"{self.shown} expands to more than {_MOST_NODES} values: a recipe is short; check its aliases."
            )
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            raise InputError(f"{self.place(node)}: the tag {node.tag!r} is not allowed: a recipe is plain values.")
        inside = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return dict(self.pairs(node, path, inside))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, path, inside) for item in node.value]
        quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"', "|", ">")
        return node.value if quoted else _scalar(node.value)

    def pairs(self, node: yaml.MappingNode, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        first_seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(f"{self.place(key_node)}: a key must be a plain name, not a list or a mapping.")
            key = str(key_node.value)
            if key == "<<":
                raise InputError(f"{self.place(key_node)}: merge keys (<<) are not supported: write the keys out.")
            dotted = f"{path}.{key}" if path else key
            if key in first_seen:
                self.tree.complaints.append(
                    f"{self.place(key_node)}: {dotted}: the key is said twice (first at "
                    f"{self.place(first_seen[key])}), now with the value {_shown_value(value_node)}: keep one of them."
                )
                continue
            first_seen[key] = key_node
            self.tree.places[dotted] = self.place(key_node)
            yield key, self.build(value_node, dotted, above)

    def place(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}" if self.with_lines else self.shown


def _shown_value(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "of a list or mapping"


def _scalar(text: str) -> Any:
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
