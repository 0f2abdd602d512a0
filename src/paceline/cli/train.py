"""`paceline train`: starts the ranks of this host, or is one of them where a launcher has set WORLD_SIZE."""

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.launch import LocalJob, choose_procs, is_rank
from paceline.launch import run as launch
from paceline.recipe import Recipe, load

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the verb and its options."""
    parser = subparsers.add_parser(
        "train",
        help="train what a recipe says, or go on where it stopped",
        description="Trains a recipe on this host's ranks; under torchrun it is one rank. A run that was stopped goes on "
        "from its newest complete checkpoint. Exit codes: 0 done, 1 failed, 2 wrong input, 3 does not fit, 75 stopped "
        "and saved.",
    )
    parser.add_argument("recipe", type=Path, help="recipe file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--procs", type=int, default=None, help="ranks to start here (default: run.procs)")
    parser.add_argument("--port", type=int, default=None, help="port of rank 0 (default: any free one)")


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the run is complete.

    Raises:
        PacelineError: see the exit codes.
    """
    recipe = load(args.recipe, args.overrides)
    if is_rank():
        from paceline.train.assemble import run_rank

        run_rank(recipe)
        return 0
    procs, reason = _procs(recipe, args.procs)
    print(f"{procs} rank{'s' * (procs != 1)} on this host ({reason})", flush=True)
    command = [sys.executable, "-m", "paceline", *["--trace"] * bool(args.trace), "train", str(args.recipe)]
    job = LocalJob(argv=[*command, *args.overrides], procs=procs, port=args.port, log_dir=Path(recipe.run.dir) / "logs")
    return launch(job)


def _procs(recipe: Recipe, asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return choose_procs(asked)[0], "--procs"
    if recipe.run.procs != "auto":
        return choose_procs(recipe.run.procs)[0], f"run.procs, {recipe.origin('run.procs')}"
    return choose_procs(None)
