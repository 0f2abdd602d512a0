"""`paceline demo`: a real run on real text, then a killed one that resumes to the same losses."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.core.errors import InputError, RunFailed

__all__ = ["add_parser", "run"]

_PROMPT = "def "
_SHORT = ["run.steps=12", "run.save_every=4steps", "run.eval_every=none", "run.log_every=4"]


def add_parser(subparsers: Any) -> None:
    """Add the verb and its options."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small model on real text, then kill a rank and resume exactly",
        description="Trains recipes/demo.yaml: a decoder of about 10M parameters on the Python standard library, ZeRO-3, "
        "two ranks. Then kills one rank of a short run half-way, resumes it, and compares the losses bit for bit.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder of the runs (default runs)")


def run(args: argparse.Namespace) -> int:
    """Run both parts; 1 if training failed, or the resumed losses differ."""
    recipe = _recipe()
    main = args.dir / "demo"
    _title(f"1. A model learns Python: paceline train {recipe} run.dir={main}")
    code = subprocess.call(_command(recipe, [f"run.dir={main}", *args.overrides]))
    if code:
        return code
    _report(main)
    _title("2. A rank is killed half-way; the run resumes and its losses are the same")
    equal = _kill_and_resume(recipe, args.dir, args.overrides)
    _title("What to try next")
    print(
        f"  paceline train {recipe} run.dir={main} run.steps=600     goes on learning\n"
        f"  paceline train {recipe} data.train=MY_FOLDER run.dir=runs/mine     your own text\n"
        f"  paceline check {recipe}     every setting, and why\n"
        f"  paceline ckpt export {main} exported     for transformers.AutoModelForCausalLM\n"
        f"  python examples/own_loop.py     the engine in a loop of your own"
    )
    return 0 if equal else 1


def _recipe() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if (folder / "demo.yaml").exists():
            found = folder / "demo.yaml"
            here = Path.cwd()
            return found.relative_to(here) if found.is_relative_to(here) else found
    raise InputError("recipes/demo.yaml is not part of this installation: run the demo from a clone of the project.")


def _command(recipe: Path, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "paceline", "train", str(recipe), *overrides]


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _report(folder: Path) -> None:
    """Evaluation loss against the unigram entropy, a sample, and where things lie."""
    from paceline.track.jsonl import losses

    facts = json.loads((folder / "data.json").read_text())
    evals = losses(folder / "log.jsonl", "eval")
    first, last = evals[min(evals)], evals[max(evals)]
    print(
        f"\nevaluation loss {first:.4f} -> {last:.4f} nats a token; unigram entropy of the same text "
        f"{facts['unigram_entropy']:.4f}: the model {'has learnt more than word counts' if last < facts['unigram_entropy'] else 'knows no more than word counts yet'}"
    )
    print(f"\nA sample after {_PROMPT!r}:\n" + "\n".join("  | " + line for line in _sample(folder).splitlines()))
    print(f"\nloss curve: {folder / 'loss.png'}   run log: {folder / 'log.jsonl'}   plan: {folder / 'plan.json'}")
    print(f"checkpoints: {folder / 'checkpoints'}   exported for transformers: {folder / 'export'}")


def _sample(folder: Path) -> str:
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  it has no types
    from tokenizers import Tokenizer

    from paceline.checkpoint import export, newest
    from paceline.checkpoint.manifest import Manifest
    from paceline.models import Decoder, DecoderConfig, generate

    checkpoint = newest(folder / "checkpoints")
    if checkpoint is None:
        raise RunFailed(f"{folder} has no checkpoint after training.")
    out = export(checkpoint, folder / "export")
    config = DecoderConfig(**Manifest.read(checkpoint).extra["model"]["config"])
    model = Decoder(config).eval()
    weights = load_file(out / "model.safetensors")
    model.load_state_dict(weights, strict=not config.tied)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = tokenizer.encode(_PROMPT).ids
    return tokenizer.decode(start + generate(model, start, 96, context=config.context, temperature=0.7, seed=1))


def _kill_and_resume(recipe: Path, folder: Path, overrides: list[str]) -> bool:
    from paceline.track.jsonl import losses

    folder.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="demo-resume-", dir=folder))
    whole, broken = fresh / "whole", fresh / "killed"
    options = [*overrides, *_SHORT]
    print("uninterrupted:", flush=True)
    if subprocess.call(_command(recipe, [f"run.dir={whole}", *options]), stdout=subprocess.DEVNULL):
        raise RunFailed(f"the short run in {whole} failed: see {whole / 'logs'}.")
    print("killed in step 7 or soon after (kill -9 of rank 1):", flush=True)
    process = subprocess.Popen(
        _command(recipe, [f"run.dir={broken}", *options]), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    killed = _kill_rank_one(process.pid, broken / "log.jsonl", after=6)
    said = process.communicate()[1].strip()
    print(f"  exit code {process.returncode}; the launcher said: {said.splitlines()[0] if said else '(nothing)'}")
    print("the same command again:", flush=True)
    if subprocess.call(_command(recipe, [f"run.dir={broken}", *options]), stdout=subprocess.DEVNULL):
        raise RunFailed(f"the resumed run in {broken} failed: see {broken / 'logs'}.")
    one, other = losses(whole / "log.jsonl"), losses(broken / "log.jsonl")
    for step in sorted(one):
        print(
            f"  step {step:>2}  uninterrupted {one[step]:.12f}  killed and resumed {other.get(step, float('nan')):.12f}"
        )
    equal = killed and process.returncode != 0 and one == other
    print("all losses are equal, bit for bit" if equal else "THE LOSSES DIFFER, or the rank could not be killed")
    return equal


def _kill_rank_one(launcher: int, log: Path, after: int) -> bool:
    """Kills the launcher's rank 1 once `after` steps are in the log."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if log.exists() and f'"step": {after},' in log.read_text():
            for pid in _children(launcher):
                if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    return True
            return False
        time.sleep(0.02)
    return False


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
