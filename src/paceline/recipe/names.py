"""Every key of a recipe by its dotted name, and what people coming from elsewhere call it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from paceline.core.errors import nearest_name
from paceline.recipe.schema import DecoderModel, Recipe, Section, TargetModel

__all__ = ["Key", "advice_for", "keys_in", "known_keys"]

_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip",
    "grad_clip": "optim.clip",
    "gradient_clipping": "optim.clip",
    "clip_grad_norm": "optim.clip",
    "batch_size": "optim.global_batch",
    "train_batch_size": "optim.global_batch",
    "global_batch_size": "optim.global_batch",
    "warmup_steps": "optim.schedule.warmup",
    "warmup_ratio": "optim.schedule.warmup",
    "lr_scheduler_type": "optim.schedule.shape",
    "micro_batch_size": "parallel.micro_batch",
    "per_device_train_batch_size": "parallel.micro_batch",
    "train_micro_batch_size_per_gpu": "parallel.micro_batch",
    "gradient_accumulation_steps": "parallel.accumulation",
    "grad_accum": "parallel.accumulation",
    "zero_stage": "parallel.stage",
    "zero_optimization": "parallel.stage",
    "gradient_checkpointing": "parallel.remat",
    "activation_checkpointing": "parallel.remat",
    "mixed_precision": "precision",
    "max_steps": "run.steps",
    "num_train_epochs": "run.epochs",
    "output_dir": "run.dir",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep",
    "eval_steps": "run.eval_every",
    "logging_steps": "run.log_every",
    "max_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "vocab_size": "data.tokenizer.vocab_size",
    "hidden_size": "model.dim",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.ffn",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: dotted name, meaning, an example, the default's text (None: it must be given), the kind of model it is for."""

    name: str
    description: str
    example: str
    default: str | None


def known_keys() -> tuple[Key, ...]:
    """Return every leaf key in the order of the schema; those of both kinds of model."""
    return tuple(_walk(Recipe, ""))


def keys_in(section: str) -> list[str]:
    """Return the last names of the keys and sections right below `section` (`""`: the top)."""
    lead = f"{section}." if section else ""
    names = [key.name.removeprefix(lead).split(".")[0] for key in known_keys() if key.name.startswith(lead)]
    return list(dict.fromkeys(names))


def advice_for(dotted: str) -> str:
    """Return what to write instead of an unknown key: its name elsewhere, its right section, or the nearest name."""
    section, _, last = dotted.rpartition(".")
    siblings = keys_in(section)
    near = nearest_name(last, siblings)
    leaves = [key.name for key in known_keys()]
    if last in _ELSEWHERE and _ELSEWHERE[last] != dotted:
        return f"here it is called {_ELSEWHERE[last]}"
    if near:
        return f"did you mean {near!r}?"
    homes = [name for name in leaves if name.rpartition(".")[2] == last or name.startswith(f"{last}.")]
    if homes:
        return f"it belongs to another section: {' or '.join(homes[:3])}"
    far = nearest_name(last, [name.rpartition(".")[2] for name in leaves])
    if far:
        return f"did you mean {next(name for name in leaves if name.rpartition('.')[2] == far)}?"
    return f"known here: {', '.join(siblings)}"


def _walk(section: type[Section], lead: str) -> Iterator[Key]:
    for name, info in section.model_fields.items():
        inner: list[type[Section]] = [kind for kind in _section_types(info) if issubclass(kind, Section)]
        if not inner:
            example = str(info.examples[0]) if info.examples else ""
            yield Key(f"{lead}{name}", info.description or "", example, _default_text(info))
        seen: set[str] = set()
        for kind in inner:
            for key in _walk(kind, f"{lead}{name}."):
                if key.name not in seen:
                    yield key
                seen.add(key.name)


def _section_types(info: FieldInfo) -> tuple[type[Any], ...]:
    if info.discriminator is not None:
        return (DecoderModel, TargetModel)
    return (info.annotation,) if isinstance(info.annotation, type) else ()


def _default_text(info: FieldInfo) -> str | None:
    if info.default_factory is not None or info.json_schema_extra == {"derived": True}:
        return "derived"
    if info.is_required():
        return None
    return (
        "none"
        if info.default is None
        else str(info.default).lower()
        if isinstance(info.default, bool)
        else str(info.default)
    )
