"""Writes docs/reference/recipe.md and cli.md from the code; with --check it fails if they are not what it would write."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.main import build_parser
from paceline.recipe.names import Key, known_keys

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
HEAD = "<!-- Written by tools/reference.py from the code. Change the code, then run it. -->\n"
WIDTH = "100"


def recipe_page() -> str:
    """One table a section of the recipe."""
    lines = [
        HEAD,
        "# Recipe keys\n",
        "A recipe is YAML. `a.b=c` on the command line wins over the file. Quantities carry units: `64ktok`, `32seq`,",
        "`100steps`, `10min`, `3%`. A key whose default is *required* must be given; *derived* follows from other keys.",
        "`paceline check` prints every key with its value on your machine, and where that comes from.",
    ]
    shown = None
    for key in known_keys():
        section = key.name.partition(".")[0]
        if section != shown:
            lines += [f"\n## {section}\n", "| key | default | meaning | example |", "|---|---|---|---|"]
            shown = section
        lines.append(_row(key))
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = {None: "*required*", "derived": "*derived*"}.get(key.default, f"`{key.default}`")
    cells = (f"`{key.name}`", default, key.description, f"`{key.example}`" if key.example else "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def cli_page() -> str:
    """The help of the command and of each verb."""
    lines = [HEAD, "# Command line\n", "Exit codes: [Read an error or an exit code](../howto/errors.md).\n"]
    for parser in _parsers(build_parser()[0]):
        lines += [f"## {parser.prog}\n", "```", parser.format_help().rstrip(), "```\n"]
    return "\n".join(lines)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _parsers(verb)


def pages() -> dict[Path, str]:
    # argparse folds its help at the width of the terminal: pages must not depend on who writes them.
    os.environ |= {"COLUMNS": WIDTH, "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    return {REFERENCE / "recipe.md": recipe_page(), REFERENCE / "cli.md": cli_page()}


def main(argv: list[str]) -> int:
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if "--check" in argv:
        for path in stale:
            print(f"{path.name} is stale: run `python tools/reference.py`")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
