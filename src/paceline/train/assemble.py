"""From a recipe to a run: plan, mesh, corpus, module, engine, optimizer, trainer, and a folder that holds it all."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import checkpoint
from paceline.core.errors import InputError
from paceline.core.quantity import Kind, Quantity
from paceline.core.records import PlanRecord, RunRecord
from paceline.data import Corpus, Loader, prepare
from paceline.mesh import Mesh
from paceline.models import Decoder, DecoderConfig, build
from paceline.plan import Plan, probe, resolve
from paceline.recipe import Recipe
from paceline.recipe.schema import DecoderModel
from paceline.tasks import pretrain
from paceline.track.console import Console
from paceline.track.jsonl import RunLog
from paceline.track.plot import loss_curve
from paceline.train.schedule import Schedule
from paceline.train.trainer import Observer, Settings, Trainer
from paceline.zero import Engine, Optimizer, shard

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD,
}  # fmt: skip
_CACHE = Path("~/.cache/paceline")


@dataclass(frozen=True)
class Run:
    """A run that is ready to go on from `engine.step`."""

    recipe: Recipe
    plan: Plan
    folder: Path
    corpus: Corpus
    engine: Engine
    optim: Optimizer
    loader: Loader
    settings: Settings
    tokens: int
    unigram: float

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def trainer(self, observers: list[Observer]) -> Trainer:
        loss = pretrain.loss if isinstance(self.engine.module, Decoder) else pretrain.any_loss
        return Trainer(
            self.engine, self.optim, self.loader, loss, self.settings,
            save=self._save, observers=observers, tokens=self.tokens,
        )  # fmt: skip

    def _save(self, tokens: int) -> tuple[Path, int]:
        path = checkpoint.save(self.checkpoints, self.engine, extra=self._extra(tokens), keep=self.recipe.run.keep)
        return path, sum(file.stat().st_size for file in path.iterdir())

    def _extra(self, tokens: int) -> dict[str, Any]:
        config = getattr(self.engine.module, "config", None)
        model = (
            {"config": config.as_dict(), "hf": {**config.to_hf(), "eos_token_id": self.corpus.end}} if config else {}
        )
        return {"identity": _identity(self.recipe, self.plan, self.corpus), "tokens": tokens, "model": model,
                "tokenizer": "tokenizer.json"}  # fmt: skip


def _identity(recipe: Recipe, plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """What must not change in a run, or its losses would not be those of one run. World size and stage may."""
    return {
        "parallel.micro_batch": plan.micro_batch,
        "optim.global_batch": f"{plan.global_sequences}seq",
        "data.sequence_length": recipe.data.sequence_length,
        "data.packing": recipe.data.packing,
        "data (files and tokenizer)": corpus.fingerprint,
        "run.seed": recipe.run.seed,
        "precision": plan.precision,
    }


def assemble(recipe: Recipe, mesh: Mesh) -> Run:
    """Builds everything and loads the newest checkpoint of the run's folder, if there is one. Collective.

    Raises:
        InputError, DoesNotFit: as the parts do; a resumed run whose identity has changed.
    """
    folder = Path(recipe.run.dir)
    plan = _plan(recipe, mesh, folder)
    corpus = _corpus(recipe, mesh, folder)
    module = _module(recipe, corpus)
    module.train()
    replicas = plan.replicate
    engine = shard(
        module, mesh, stage=plan.stage, precision=plan.precision, remat=plan.remat, seed=recipe.run.seed,
        shards=mesh.world // replicas,
    )  # fmt: skip
    optim = _optimizer(engine, recipe)
    data = recipe.data
    loader = Loader(
        corpus, sequence_length=data.sequence_length, micro_batch=plan.micro_batch, packing=data.packing,
        global_sequences=plan.global_sequences, seed=recipe.run.seed, device=mesh.device,
        steps=_steps(recipe, plan), epochs=recipe.run.epochs,
    )  # fmt: skip
    extra = checkpoint.load(folder / "checkpoints", engine, optim)
    if extra is not None:
        _refuse_other_identity(extra["identity"], _identity(recipe, plan, corpus), folder)
    unigram = corpus.unigram_entropy() if mesh.is_main else 0.0
    settings = _settings(recipe, loader.steps, has_eval=corpus.eval is not None)
    if mesh.is_main:
        _write_folder(recipe, plan, folder, corpus, unigram)
    tokens = int(extra["tokens"]) if extra else 0
    return Run(recipe, plan, folder, corpus, engine, optim, loader, settings, tokens, unigram)


def _plan(recipe: Recipe, mesh: Mesh, folder: Path) -> Plan:
    """Resolved on rank 0 for all; a resumed run keeps its identity."""

    def resolved() -> Plan:
        hardware = probe()
        stored = folder / "plan.json"
        kept = Plan.load(stored) if stored.exists() and checkpoint.newest(folder / "checkpoints") else None
        memory = hardware.memory_bytes // mesh.local_world
        fast, why = hardware.bf16_fast, hardware.bf16_source
        if mesh.device.type == "cuda":
            memory = torch.cuda.mem_get_info(mesh.device)[0]
            fast, why = torch.cuda.is_bf16_supported(), torch.cuda.get_device_name(mesh.device)
        parameters = None
        if not isinstance(recipe.model, DecoderModel):
            parameters = sum(p.numel() for p in build(recipe.model.target, recipe.model.arguments).parameters())
        return resolve(
            recipe, world=mesh.world, memory_bytes=memory, bf16_fast=fast, bf16_reason=why, kept=kept,
            parameters=parameters, world_source=f"{mesh.world} rank(s) started",
        )  # fmt: skip

    return _on_main(mesh, resolved)


def _on_main(mesh: Mesh, make: Any) -> Any:
    """What rank 0 makes, on all ranks; its error is everybody's, so that none waits for it."""
    made, error = None, None
    if mesh.is_main:
        try:
            made = make()
        except Exception as caught:  # noqa: BLE001  raised again below, on every rank
            error = caught
    made, error = mesh.broadcast_object((made, error))
    if error is not None:
        raise error
    return made


def _corpus(recipe: Recipe, mesh: Mesh, folder: Path) -> Corpus:
    data = recipe.data
    held: Any = data.eval
    if isinstance(held, Quantity):
        held = float(held.amount)

    def prepared() -> Corpus:
        return prepare(
            data.train, held_out=held, vocab_size=data.tokenizer.vocab_size, text_key=data.text_key,
            cache=Path(data.cache or _CACHE).expanduser(),
            tokenizer_file=Path(data.tokenizer.file) if data.tokenizer.file else None,
        )  # fmt: skip

    if mesh.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    _on_main(mesh, lambda: prepared().fingerprint)
    return prepared()


def _module(recipe: Recipe, corpus: Corpus) -> torch.nn.Module:
    model = recipe.model
    if not isinstance(model, DecoderModel):
        torch.manual_seed(recipe.run.seed)
        return build(model.target, model.arguments)
    config = DecoderConfig(
        vocab_size=corpus.vocab_size, dim=model.dim, layers=model.layers, heads=model.heads, kv_heads=model.kv_heads,
        ffn=model.ffn, context=model.context, tied=model.tied, dropout=model.dropout, rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
    )  # fmt: skip
    return Decoder(config, recipe.run.seed)


def _optimizer(engine: Engine, recipe: Recipe) -> Optimizer:
    """Norms and biases, all that is not a matrix, are not decayed."""
    o = recipe.optim
    options: dict[str, Any] = {"lr": o.lr, "weight_decay": o.weight_decay}
    if o.name in ("adamw", "adam", "nadam", "radam", "adamax"):
        options["betas"] = tuple(o.betas)
    if o.name != "sgd":
        options["eps"] = o.eps
    if o.name in ("sgd", "rmsprop"):
        options["momentum"] = o.momentum
    return engine.optimizer(
        OPTIMIZERS[o.name], groups=lambda name, p: {"weight_decay": 0.0} if p.dim() < 2 else {}, **options
    )


def _steps(recipe: Recipe, plan: Plan) -> int | None:
    run = recipe.run
    if run.tokens is not None:
        return max(1, run.tokens.whole // (plan.global_sequences * recipe.data.sequence_length))
    return run.steps


def _in_steps(quantity: Quantity | None, steps: int) -> int | None:
    """A pace in steps: `100steps`, or a share of the run such as `10%`."""
    if quantity is None:
        return None
    if quantity.kind is Kind.FRACTION:
        return max(1, round(float(quantity.amount) * steps))
    return quantity.whole


def _settings(recipe: Recipe, steps: int, *, has_eval: bool) -> Settings:
    s, run = recipe.optim.schedule, recipe.run
    by_time = run.save_every is not None and run.save_every.kind is Kind.TIME
    schedule = Schedule(
        shape=s.shape, steps=steps, warmup=_pace(s.warmup, steps), decay=_pace(s.decay, steps),
        final=float(s.final.amount),
    )  # fmt: skip
    return Settings(
        steps=steps, lr=recipe.optim.lr, schedule=schedule, max_norm=recipe.optim.clip, evaluates=has_eval,
        eval_every=_in_steps(run.eval_every, steps) if has_eval else None,
        save_every=None if by_time else _in_steps(run.save_every, steps),
        save_seconds=float(run.save_every.seconds) if by_time and run.save_every else None,
    )  # fmt: skip


def _pace(quantity: Quantity, steps: int) -> int:
    return round(float(quantity.amount) * steps) if quantity.kind is Kind.FRACTION else quantity.whole


def _refuse_other_identity(stored: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for key, value in now.items():
        if stored.get(key) != value:
            raise InputError(
                f"{key} is {value!r}, but the run in {folder} was started with {stored.get(key)!r}: a run keeps it, "
                f"since its losses would not be those of one run otherwise. Set it back, or choose another run.dir."
            )


def _write_folder(recipe: Recipe, plan: Plan, folder: Path, corpus: Corpus, unigram: float) -> None:
    plan.save(folder / "plan.json")
    (folder / "recipe.json").write_text(json.dumps(recipe.as_dict(), indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(corpus.tokenizer, folder / "tokenizer.json")
    facts = {
        "train_tokens": len(corpus.train.tokens),
        "eval_tokens": len(corpus.eval.tokens) if corpus.eval is not None else 0,
        "vocab_size": corpus.vocab_size,
        "unigram_entropy": unigram,
        "fingerprint": corpus.fingerprint,
    }
    (folder / "data.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def run_rank(recipe: Recipe) -> None:
    """Everything that one rank does; rank 0 speaks for all. Raises Interrupted after a signal, with the state saved."""
    from paceline.mesh import init

    mesh = init()
    with warnings.catch_warnings(record=mesh.is_main) as passed_over:
        run = assemble(recipe, mesh)
    with contextlib.ExitStack() as stack:
        observers = _speakers(run, stack, [str(w.message) for w in passed_over or []]) if mesh.is_main else []
        for _ in run.trainer(observers).steps():
            pass
    if mesh.is_main:
        _farewell(run)
    mesh.close()


def _speakers(run: Run, stack: contextlib.ExitStack, warned: list[str]) -> list[Observer]:
    """The run log and the console, with what is to be said before the first step."""
    log = stack.enter_context(contextlib.closing(RunLog(run.folder / "log.jsonl")))
    console = Console(run.settings.steps, run.engine.step, run.recipe.run.log_every)
    for line in _introduction(run, warned):
        console.say(line)
    stack.enter_context(console)
    log(RunRecord("resume" if run.engine.step else "start", run.engine.step, {"world": run.engine.mesh.world}))
    log(PlanRecord(run.plan.settings_dict()))
    return [log, console]


def _introduction(run: Run, warned: list[str]) -> Iterator[str]:
    yield from warned
    for key, setting in run.plan.settings.items():
        yield f"{key:<22} {setting.value!s:<10} {setting.reason}"
    yield run.engine.describe()
    facts = f"{len(run.corpus.train.tokens):,} training tokens, vocabulary {run.corpus.vocab_size:,}"
    yield f"{facts}, unigram entropy of the evaluation text {run.unigram:.4f} nats a token"
    if run.engine.step >= run.settings.steps:
        yield f"The run is complete: {run.engine.step} steps are done. Raise run.steps, or choose another run.dir."
    elif run.engine.step:
        yield f"Going on after step {run.engine.step}, from {checkpoint.newest(run.checkpoints)}"


def _farewell(run: Run) -> None:
    picture = loss_curve(run.folder / "log.jsonl", run.folder / "loss.png", run.unigram)
    console = Console(run.settings.steps)
    console.say("measured memory of rank 0:\n" + run.engine.memory().table())
    where = f"{run.folder}: checkpoints/, log.jsonl, plan.json, recipe.json, tokenizer.json, logs/"
    console.say(
        f"Everything lies in {where}" + (", loss.png" if picture else " (no loss.png: matplotlib is not installed)")
    )
