"""Which parameters form which unit: one unit for each repeated block, one (the root) for the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Part:
    """A unit to be: its name, its module, and its parameters by canonical name."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of the outermost `ModuleList`s of two or more modules of one class, with parameters, in order."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name == block or name.startswith(block + ".") for block, _ in found)
        if inside or not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        alike = len({type(m) for m in module}) == 1 and all(any(True for _ in m.parameters()) for m in module)
        if alike and not isinstance(module[0], nn.ModuleList | nn.ModuleDict | nn.ParameterList):
            prefix = name + "." if name else ""
            found += [(prefix + key, block) for key, block in module.named_children()]
    return found


def given_blocks(model: nn.Module, units: Iterable[str | type[nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Blocks that the user names, by module name or by class; InputError for one that matches nothing."""
    names = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for unit in units:
        hits = {n: m for n, m in names.items() if (n == unit if isinstance(unit, str) else isinstance(m, unit))}
        if not hits:
            raise InputError(
                f"unit {unit!r} matches no module of {type(model).__name__}; name one of "
                f"{', '.join(list(names)[1:9])}, ... or give a module class."
            )
        chosen.update(hits)
    return [(n, m) for n, m in chosen.items() if n and not any(n.startswith(other + ".") for other in chosen if other)]


def ties(model: nn.Module) -> dict[str, str]:
    """Alias -> canonical (first) name of each parameter that several modules share."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def partition(model: nn.Module, units: Sequence[str | type[nn.Module]] | None = None) -> list[Part]:
    """Blocks in module order, then the root with everything else; parameters tied across units go to the root."""
    _refuse_shared_memory(model)
    blocks = find_blocks(model) if units is None else given_blocks(model, units)
    homes: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = next((block for block, _ in blocks if name.startswith(block + ".")), "")
        homes.setdefault(id(parameter), set()).add(home)
    parts = {block: Part(block, module, ()) for block, module in blocks}
    parts[""] = Part("", model, ())
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in parts}
    for name, parameter in model.named_parameters():
        home = homes[id(parameter)]
        owned[home.pop() if len(home) == 1 else ""].append((name, parameter))
    return [Part(part.name, part.module, tuple(owned[name])) for name, part in parts.items()]


def _refuse_shared_memory(model: nn.Module) -> None:
    """Two Parameter objects over the same elements would silently part when each gets a place of its own."""
    seen: dict[tuple[int, int], str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(f"parameter {name!r} is on the meta device: give it values before `paceline.shard`.")
        if parameter.numel() == 0:
            continue
        key = (parameter.data_ptr(), parameter.numel())
        if key in seen:
            raise InputError(
                f"parameters {seen[key]!r} and {name!r} are two objects over the same memory; tie them by assigning the "
                f"same nn.Parameter to both modules, which Paceline then keeps tied."
            )
        seen[key] = name
