"""`paceline ckpt`: look at checkpoints, check them, and export one for transformers."""

import argparse
import time
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the verb and its own verbs."""
    parser = subparsers.add_parser(
        "ckpt", help="list, show, verify or export checkpoints", description="Looks after checkpoints; starts no ranks."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    ls = actions.add_parser("ls", help="checkpoints of a run, oldest first")
    ls.add_argument("run", type=Path, help="run folder, or its checkpoints folder")
    for name, text in (("show", "what one holds"), ("verify", "read every byte and compare it with its checksum")):
        action = actions.add_parser(name, help=text)
        action.add_argument("checkpoint", type=Path, help="checkpoint folder, or a run folder for its newest")
    export = actions.add_parser("export", help="write safetensors, config and tokenizer that transformers loads")
    export.add_argument("checkpoint", type=Path, help="checkpoint folder, or a run folder for its newest")
    export.add_argument("out", type=Path, help="folder to write")
    export.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default fp32)")
    export.add_argument("--tokenizer", type=Path, default=None, help="tokenizer.json (default: the run's own)")


def run(args: argparse.Namespace) -> int:
    """Do it; 2 for a checkpoint that is missing or damaged."""
    if args.action == "ls":
        return _ls(args.run)
    from paceline.checkpoint import export, verify

    folder = _one(args.checkpoint)
    if args.action == "verify":
        verify(folder)
        print(f"{folder} is sound.")
    elif args.action == "show":
        _show(folder)
    else:
        out = export(folder, args.out, dtype=args.dtype, tokenizer=args.tokenizer)
        print(f"wrote {out}: {', '.join(sorted(p.name for p in out.iterdir() if not p.name.startswith('.')))}")
    return 0


def _root(run: Path) -> Path:
    return run / "checkpoints" if (run / "checkpoints").is_dir() else run


def _one(path: Path) -> Path:
    from paceline.checkpoint import newest
    from paceline.checkpoint.manifest import step_of
    from paceline.core.errors import InputError

    if step_of(path) is not None:
        return path
    found = newest(_root(path))
    if found is None:
        raise InputError(
            f"there is no complete checkpoint in {path}: name a run folder or a checkpoint (step-XXXXXXXX)."
        )
    return found


def _ls(run: Path) -> int:
    from paceline.checkpoint import list_checkpoints
    from paceline.checkpoint.manifest import Manifest
    from paceline.core.errors import InputError

    found = list_checkpoints(_root(run))
    if not found:
        raise InputError(f"there is no complete checkpoint in {run}.")
    for folder in found:
        try:
            about = Manifest.read(folder)
        except InputError:
            print(f"{folder}  damaged: its manifest is not what was written")
            continue
        size = sum(f["size"] for f in about.files.values()) / 2**20
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
        print(f"{folder}  step {about.step}  {size:.1f} MiB  {about.world} rank(s)  {when}")
    return 0


def _show(folder: Path) -> None:
    from paceline.checkpoint.manifest import Manifest

    about = Manifest.read(folder)
    tensors = about.by_tensor()
    kinds: dict[str, list[int]] = {}
    for (kind, _), entries in tensors.items():
        kinds.setdefault(kind, []).append(entries[-1].stop)
    print(
        f"{folder}: step {about.step}, written by {about.world} rank(s), "
        f"{', '.join(f'{name} {version}' for name, version in about.versions.items())}"
    )
    for kind, sizes in kinds.items():
        print(f"  {kind:<12} {len(sizes):>5} tensors {sum(sizes):>14,} elements")
    optimizer = about.scalars.get("optimizer", {}).get("class", "none")
    print(f"  precision {about.scalars['precision']}, optimizer {optimizer}, ties {about.scalars['ties'] or 'none'}")
    for key, value in about.extra.items():
        print(f"  {key}: {value}")
