"""`paceline check`: every setting of a recipe, its value, and where that comes from. Loads no torch."""

import argparse
from pathlib import Path
from typing import Any, cast

from paceline.core.quantity import Quantity
from paceline.launch import choose_procs
from paceline.plan import Plan, probe, recipe_census, resolve
from paceline.recipe import Recipe, load

__all__ = ["add_parser", "run"]

_UNTIL_BUILT = "resolved when the model is built: only then its size is known"


def add_parser(subparsers: Any) -> None:
    """Add the verb and its options."""
    parser = subparsers.add_parser(
        "check",
        help="check a recipe and show what each setting is, and why",
        description="Checks a recipe and prints each setting, its value on this machine, and where that comes from.",
    )
    parser.add_argument("recipe", type=Path, help="recipe file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--procs", type=int, default=None, help="ranks to resolve for (default: run.procs)")


def run(args: argparse.Namespace) -> int:
    """Print the settings; 0 if the recipe is right.

    Raises:
        InputError: it is not.
        DoesNotFit: it cannot run in the memory of this machine.
    """
    recipe = load(args.recipe, args.overrides)
    procs, source = _procs(recipe, args.procs)
    hardware = probe()
    plan = resolve(
        recipe,
        world=procs,
        world_source=source,
        memory_bytes=hardware.memory_bytes // procs,
        bf16_fast=hardware.bf16_fast,
        bf16_reason=hardware.bf16_source,
    )
    _print_table(_rows(recipe, plan, source))
    print()
    _print_size(recipe, plan, hardware.memory_source)
    print(f"{args.recipe} is right.")
    return 0


def _procs(recipe: Recipe, asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return choose_procs(asked)[0], f"--procs {asked}"
    if recipe.run.procs != "auto":
        return choose_procs(recipe.run.procs)[0], f"run.procs, {recipe.origin('run.procs')}"
    return choose_procs(None)


def _rows(recipe: Recipe, plan: Plan, procs_source: str) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for key, value in recipe.values():
        origin = recipe.origin(key)
        setting = plan.settings.get(key)
        if key == "run.procs":
            rows.append((key, str(plan.world), procs_source))
        elif setting is not None and value == "auto":
            rows.append((key, str(setting.value), f"auto: {setting.reason}"))
        elif value == "auto":
            rows.append((key, "auto", _UNTIL_BUILT))
        else:
            rows.append((key, _shown(value), origin))
        if (
            key == "optim.global_batch"
            and setting is not None
            and value not in ("auto", None)
            and str(value) != setting.value
        ):
            rows.append(("", str(setting.value), setting.reason))
    return rows


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(_shown(item) for item in cast("tuple[object, ...]", value))
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value)
        if isinstance(value, (str, int, Quantity))
        else repr(value)
    )


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(28, max(len(value) for _, value, _ in rows))
    for key, value, why in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {why}".rstrip())


def _print_size(recipe: Recipe, plan: Plan, memory_source: str) -> None:
    census = recipe_census(recipe)
    if census is None:
        print("Parameters: unknown until the model is built, and with them stage, remat and memory.")
        return
    print(
        f"Parameters: {census.parameters:,} by formula (a tokenizer trained on little text may have a smaller vocabulary)."
    )
    parts = ", ".join(f"{name} {size / 1024**2:.0f}" for name, size in plan.memory.items() if size)
    total, free = sum(plan.memory.values()) / 1024**2, plan.memory_available / 1024**2
    print(f"Memory of a rank, MiB: {total:.0f} of {free:.0f} ({memory_source}): {parts}.")
