"""The `paceline` command: finds the verb, runs it, and turns errors into one paragraph and an exit code.

A verb is a module of this package with `add_parser(subparsers)` and `run(args) -> int`. Modules load fast and without
torch; what is heavy is imported inside `run`.
"""

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import paceline
from paceline.core.errors import PacelineError, nearest_name

__all__ = ["VERBS", "build_parser", "main"]

VERBS = ("train", "check", "ckpt", "demo")

_INTERRUPTED = 130
_BROKEN_PIPE = 141
_OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=.*", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 wrong input, 3 does not fit, 75 stopped and saved."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, verbs = build_parser()
    args = _parse(parser, arguments)
    if args.verb is None:
        parser.print_help()
        return 2
    try:
        code = int(verbs[args.verb].run(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, a closed pager) has gone; without this Python complains once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        _say("Stopped by Ctrl-C.", trace=args.trace)
        return _INTERRUPTED
    except PacelineError as error:
        _say(str(error), trace=args.trace)
        return error.exit_code
    except MemoryError:
        _say("The memory of this machine ran out: use a smaller micro-batch or model, or more ranks.", trace=args.trace)
        return 3
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _say(f"The system refused: {error.strerror or error}{where}.", trace=args.trace)
        return 1
    except Exception as error:  # noqa: BLE001  the last resort: whatever it is, the user gets a paragraph and a code
        _say(
            f"Paceline broke: {type(error).__name__}: {error}. This is not your recipe's fault alone, since a wrong input gets a "
            "clearer message: please report it with the output of the same command with --trace.",
            trace=args.trace,
        )
        return 1
    return code


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """Return the parser of the whole command and the module of each verb."""
    parser = argparse.ArgumentParser(
        prog="paceline", description="Trains PyTorch models with ZeRO, on whatever there is."
    )
    parser.add_argument("--version", action="version", version=f"paceline {paceline.__version__}")
    parser.add_argument("--trace", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB")
    verbs = {verb: importlib.import_module(f"paceline.cli.{verb}") for verb in VERBS}
    for module in verbs.values():
        module.add_parser(subparsers)
    for verb in subparsers.choices.values():
        # Also after the verb, where one adds it on seeing an error; SUPPRESS keeps what was said before the verb.
        verb.add_argument(
            "--trace", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
    return parser, verbs


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse; `key=value` may stand anywhere after the recipe, which argparse alone does not allow once an option came."""
    args, rest = parser.parse_known_args(arguments)
    overrides = getattr(args, "overrides", None)
    unknown: list[str] = []
    for item in rest:
        if overrides is not None and _OVERRIDE.fullmatch(item):
            overrides.append(item)
        else:
            unknown.append(item)
    if unknown:
        parser.error(_unknown_advice(parser, args, unknown))
    return args


def _unknown_advice(parser: argparse.ArgumentParser, args: argparse.Namespace, unknown: list[str]) -> str:
    said = f"unrecognized arguments: {' '.join(unknown)}"
    near = nearest_name(unknown[0].split("=")[0], _options(parser, args.verb))
    if near:
        return f"{said} (did you mean {near}?)"
    return said if unknown[0].startswith("-") else f"{said} (an override is written key=value)"


def _options(parser: argparse.ArgumentParser, verb: str | None) -> list[str]:
    """The long options of the command and of a verb, read from their own help."""
    text = parser.format_help()
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        choices = cast("Any", action.choices)
        if action.dest == "verb" and verb in choices:
            text += str(choices[verb].format_help())
    return re.findall(r"--[a-z][a-z-]*", text)


def _say(paragraph: str, *, trace: bool) -> None:
    try:
        if trace:
            traceback.print_exc()
        print(f"paceline: {paragraph}", file=sys.stderr)
    except BrokenPipeError:
        return
