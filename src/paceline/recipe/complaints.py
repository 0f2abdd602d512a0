"""What pydantic found, in the words of Paceline: place, key, value, rule, remedy."""

from typing import Any

from pydantic import ValidationError

from paceline.core.errors import nearest_name
from paceline.recipe.names import advice_for, keys_in, known_keys
from paceline.recipe.source import Tree

__all__ = ["complaints_of"]

_NOT_TOLD = {"default_factory_not_called"}  # follows from another error, which is told


def complaints_of(error: ValidationError, tree: Tree, shown: str) -> list[str]:
    """Return one line for each fault: `file:line: key: value: rule; remedy.`"""
    found: list[str] = []
    for fault in error.errors(include_url=False):
        if fault["type"] in _NOT_TOLD:
            continue
        dotted = _dotted(fault["type"], fault["loc"], fault.get("ctx", {}))
        told = _told(fault["type"], dotted, fault)
        found.append(f"{_place(dotted, tree, shown)}: {told}{'' if told.endswith('?') else '.'}")
    return found


def _dotted(kind: str, loc: tuple[int | str, ...], context: dict[str, Any]) -> str:
    parts = [str(part) for part in loc]
    if len(parts) > 1 and parts[0] == "model" and parts[1] in ("decoder", "target"):
        del parts[1]  # pydantic names the kind of model it tried
    if kind == "union_tag_invalid":
        parts.append("kind")
    if context.get("key") and "message" in context:
        parts += str(context["key"]).split(".")
    return ".".join(parts)


def _place(dotted: str, tree: Tree, shown: str) -> str:
    """The place of the key or, for one that is not there, of the nearest section above it."""
    while dotted:
        if dotted in tree.places:
            return tree.places[dotted]
        dotted = dotted.rpartition(".")[0]
    return shown


def _told(kind: str, dotted: str, fault: Any) -> str:
    value = fault["input"]
    if kind == "extra_forbidden":
        last = dotted.rpartition(".")[2]
        return f"{dotted}: unknown key {last!r} (value {_short(value)}): {advice_for(dotted)}"
    if kind == "missing":
        return _told_missing(dotted)
    if kind == "union_tag_not_found":
        return "model.kind is missing: add `kind: decoder` (ours) or `kind: target` (any torch module)"
    if kind == "union_tag_invalid":
        tag = str(fault["ctx"]["tag"])
        return (
            f"model.kind: {tag!r} is not a kind of model{_or_near(tag, ['decoder', 'target'])}; known: decoder, target"
        )
    if kind in ("literal_error", "enum"):
        known = [str(item).strip("'") for item in fault["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return f"{dotted}: {_short(value)} is not one of {', '.join(known)}{_or_near(str(value), known)}"
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return _told_not_section(dotted, value)
    if kind == "rule":
        return f"{dotted}: {fault['ctx']['message']}" if dotted else str(fault["ctx"]["message"])
    if kind == "value_error":
        return f"{dotted}: {_short(value)}: {_rule(dotted, fault)}"
    return f"{dotted}: {_short(value)}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _rule(dotted: str, fault: Any) -> str:
    rule = str(fault["ctx"]["error"]).removeprefix(f"{str(fault['input'])!r} ")
    example = next((key.example for key in known_keys() if key.name == dotted), "")
    if not example or "write it like" in rule:
        return rule
    return f"{rule}, for example `{dotted.rpartition('.')[2]}: {example}`"


def _told_missing(dotted: str) -> str:
    below = [key for key in known_keys() if key.name.startswith(f"{dotted}.") and key.default is None]
    if below or (dotted in keys_in("") and dotted != "precision"):
        needs = ", ".join(f"{key.name.removeprefix(dotted + '.')}: {key.example}" for key in below[:4])
        return f"the section {dotted!r} is missing: add `{dotted}: {{{needs}}}`"
    example = next((key.example for key in known_keys() if key.name == dotted), "...")
    return f"{dotted} is missing: add `{dotted.rpartition('.')[2]}: {example}`"


def _told_not_section(dotted: str, value: object) -> str:
    said = "is empty" if value is None else f"is {_short(value)}"
    return f"{dotted}: the section {said}, but it must be a mapping with keys such as {', '.join(keys_in(dotted)[:4])}"


def _or_near(name: str, known: list[str]) -> str:
    near = nearest_name(name, known)
    return f", did you mean {near!r}?" if near else ""


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
