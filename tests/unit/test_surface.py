"""The surface: public names, recipe keys, command-line options. A change here is a change for users: say it in changes/."""

import argparse
from collections.abc import Iterator

import paceline
from paceline.cli.main import build_parser
from paceline.recipe.names import known_keys

NAMES = """
Engine
Mesh
Optimizer
StepReport
init
load
save
shard
""".split()

KEYS = """
model.kind
model.dim
model.layers
model.heads
model.kv_heads
model.ffn
model.context
model.tied
model.dropout
model.rope_theta
model.norm_eps
model.target
model.arguments
data.train
data.eval
data.sequence_length
data.packing
data.text_key
data.tokenizer.vocab_size
data.tokenizer.file
data.cache
task.kind
optim.name
optim.lr
optim.betas
optim.eps
optim.momentum
optim.weight_decay
optim.clip
optim.global_batch
optim.schedule.shape
optim.schedule.warmup
optim.schedule.decay
optim.schedule.final
parallel.stage
parallel.micro_batch
parallel.accumulation
parallel.replicate
parallel.remat
precision
run.steps
run.epochs
run.tokens
run.seed
run.dir
run.save_every
run.keep
run.eval_every
run.log_every
run.procs
""".split()

OPTIONS = {
    "paceline": "--version --trace",
    "paceline check": "recipe overrides --procs --trace",
    "paceline ckpt": "--trace",
    "paceline ckpt export": "checkpoint out --dtype --tokenizer",
    "paceline ckpt ls": "run",
    "paceline ckpt show": "checkpoint",
    "paceline ckpt verify": "checkpoint",
    "paceline demo": "overrides --dir --trace",
    "paceline train": "recipe overrides --procs --port --trace",
}


def test_public_names() -> None:
    assert sorted(paceline.__all__) == NAMES


def test_every_public_name_loads() -> None:
    assert all(getattr(paceline, name) is not None for name in NAMES)


def test_recipe_keys() -> None:
    assert [key.name for key in known_keys()] == KEYS


def test_command_line_options() -> None:
    assert dict(sorted(_options(build_parser()[0]))) == {verb: words.split() for verb, words in OPTIONS.items()}


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    found: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _options(verb)
        elif not isinstance(action, argparse._HelpAction):
            found.append(action.option_strings[-1] if action.option_strings else action.dest)
    yield parser.prog, found
