"""What a recipe says: frozen, strict, inert data. It names no machine: global quantities only, the rest is `auto`.

Every key is listed here once, with its meaning, its default and an example; `paceline check`, the error messages and the
reference page read them from here.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from paceline.core.errors import InputError, nearest_name
from paceline.core.quantity import Quantity, parse
from paceline.recipe import fields as of

__all__ = [
    "DataSection",
    "DecoderModel",
    "OptimSection",
    "ParallelSection",
    "Recipe",
    "RunSection",
    "Schedule",
    "TargetModel",
    "TaskSection",
    "TokenizerSection",
]


def broken_rule(key: str, message: str) -> PydanticCustomError:
    """Return the error of a rule that spans several keys; `key` (dotted, below the section) is where to point."""
    return PydanticCustomError("rule", "{message}", {"key": key, "message": message})


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DecoderModel(Section):
    """Our dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    The vocabulary size is the tokenizer's (`data.tokenizer.vocab_size`): said once.
    """

    kind: Literal["decoder"] = Field(description="decoder (ours) or target (any torch module)", examples=["decoder"])
    dim: of.Whole = Field(description="width of the residual stream", examples=["256"])
    layers: of.Whole = Field(description="number of blocks", examples=["8"])
    heads: of.Whole = Field(description="attention heads", examples=["8"])
    kv_heads: of.Whole = Field(
        default_factory=lambda seen: seen["heads"],
        description="heads of keys and values; as many as `heads` if not given",
        examples=["4"],
    )
    ffn: of.Whole = Field(
        default_factory=lambda seen: -(-8 * seen["dim"] // (3 * 64)) * 64,
        description="width inside the SwiGLU; 8/3 of `dim` rounded up to 64 if not given",
        examples=["704"],
    )
    context: of.Length = Field(
        description="longest sequence the model takes; `data.sequence_length` if not given",
        examples=["1024"],
        json_schema_extra={"derived": True},
    )
    tied: of.Flag = Field(default=False, description="output head shares the embedding", examples=["true"])
    dropout: of.Probability = Field(default=0.0, description="dropout after attention and SwiGLU", examples=["0.1"])
    rope_theta: of.Positive = Field(default=10000.0, description="base of the rotary frequencies", examples=["10000"])
    norm_eps: of.Positive = Field(default=1e-5, description="added under the root of RMSNorm", examples=["1e-5"])

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        if self.dim % self.heads:
            raise broken_rule("heads", f"{self.heads} heads do not divide dim {self.dim}: choose a divisor of dim")
        if self.heads % self.kv_heads:
            raise broken_rule("kv_heads", f"{self.kv_heads} kv_heads do not divide {self.heads} heads")
        if (self.dim // self.heads) % 2:
            raise broken_rule(
                "heads", f"a head is {self.dim // self.heads} wide, but rotary positions need an even width"
            )
        if self.dropout >= 1.0:
            raise broken_rule("dropout", "dropout 1 drops everything: choose less")
        return self


class TargetModel(Section):
    """Any `torch.nn.Module` that returns its loss, made by a callable of the user's."""

    kind: Literal["target"] = Field(description="decoder (ours) or target (any torch module)", examples=["target"])
    target: of.Text = Field(description="callable that makes the module", examples=["my_package.models:build"])
    arguments: Mapping[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the callable", examples=["{width: 64}"]
    )

    @model_validator(mode="after")
    def _names_a_callable(self) -> Self:
        module, _, name = self.target.partition(":")
        if not module or not name.isidentifier():
            raise broken_rule(
                "target", f"{self.target!r} does not name a callable: write `package.module:name` or `file.py:name`"
            )
        return self


class TokenizerSection(Section):
    """The byte-level BPE tokenizer: trained once on the training text and cached, or read from a file."""

    vocab_size: of.Length = Field(default=8192, description="entries of the vocabulary", examples=["8192"])
    file: of.OptionalText = Field(
        default=None, description="a tokenizer.json to use; none: train one", examples=["tokenizer.json"]
    )


class DataSection(Section):
    """Where text comes from and how it is cut into sequences."""

    train: of.Sources = Field(
        description="files, folders or patterns (.txt, .py, .md, .jsonl), or `stdlib`: the sources of Python's standard library",
        examples=["stdlib"],
    )
    eval: of.HeldOut = Field(
        default=parse("2%"),
        description="evaluation text: a share held out of `train`, sources, or none",
        examples=["2%"],
    )
    sequence_length: of.Length = Field(description="tokens of one sequence", examples=["256"])
    packing: of.Flag = Field(
        default=True, description="several documents in a sequence, none sees another", examples=["true"]
    )
    text_key: of.Text = Field(default="text", description="key of the text in a JSONL line", examples=["text"])
    tokenizer: TokenizerSection = Field(
        default_factory=TokenizerSection, description="the tokenizer", examples=["{vocab_size: 8192}"]
    )
    cache: of.OptionalText = Field(
        default=None,
        description="folder of tokenizers and token shards; none: the user's cache folder",
        examples=["cache"],
    )


class TaskSection(Section):
    """What is learnt."""

    kind: Literal["pretrain"] = Field(default="pretrain", description="next-token prediction", examples=["pretrain"])


class Schedule(Section):
    """The learning rate over optimizer steps, as a share of `optim.lr`."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine", description="wsd: warm up, stay, decay", examples=["cosine"]
    )
    warmup: of.Pace = Field(default=parse("3%"), description="linear rise from zero at the start", examples=["3%"])
    decay: of.Pace = Field(
        default=parse("20%"), description="last part of the run, falling (wsd only)", examples=["20%"]
    )
    final: of.Share = Field(default=parse("10%"), description="share of `lr` left at the end", examples=["10%"])

    @model_validator(mode="after")
    def _no_idle_key(self) -> Self:
        if self.shape != "wsd" and _differs(self, "decay"):
            raise broken_rule(
                "decay", f"shape {self.shape} has no decay part and would ignore this: drop it, or use shape wsd"
            )
        if self.shape == "constant" and _differs(self, "final"):
            raise broken_rule(
                "final", "shape constant never falls and would ignore this: drop it, or use another shape"
            )
        return self


_ADAM = ("adamw", "adam", "nadam", "radam", "adamax")
_OPTIMIZERS_WITH = {
    "betas": _ADAM,
    "eps": (*_ADAM, "adagrad", "rmsprop"),
    "momentum": ("sgd", "rmsprop"),
}


class OptimSection(Section):
    """The optimizer, its global batch and its schedule."""

    name: Literal["adamw", "adam", "nadam", "radam", "adamax", "adagrad", "rmsprop", "sgd"] = Field(
        default="adamw", description="an elementwise optimizer of torch", examples=["adamw"]
    )
    lr: of.Positive = Field(description="peak learning rate", examples=["3e-4"])
    betas: of.Betas = Field(default=(0.9, 0.95), description="decay rates of Adam's moments", examples=["[0.9, 0.95]"])
    eps: of.Positive = Field(default=1e-8, description="added to the root of the second moment", examples=["1e-8"])
    momentum: of.Probability = Field(default=0.0, description="momentum of sgd and rmsprop", examples=["0.9"])
    weight_decay: of.Size = Field(
        default_factory=lambda seen: 0.1 if seen.get("name") == "adamw" else 0.0,
        description="decay of matrices (never of norms and biases); 0.1 for adamw, else 0",
        examples=["0.1"],
    )
    clip: of.OptionalNumber = Field(
        default=1.0, description="largest global gradient norm; none: no clipping", examples=["1.0"]
    )
    global_batch: of.AutoQuantity = Field(
        description="tokens or sequences of one optimizer step over all ranks; auto: from micro_batch x accumulation x world",
        examples=["64ktok"],
    )
    schedule: Schedule = Field(
        default_factory=Schedule, description="learning rate over steps", examples=["{shape: cosine, warmup: 3%}"]
    )

    @model_validator(mode="after")
    def _no_idle_key(self) -> Self:
        for key, names in _OPTIMIZERS_WITH.items():
            if self.name not in names and _differs(self, key):
                raise broken_rule(
                    key, f"{self.name} has no {key} and would ignore this: drop it (used by {', '.join(names)})"
                )
        return self


class ParallelSection(Section):
    """How the work is spread. Every key may stay `auto`."""

    stage: of.AutoStage = Field(
        default="auto",
        description="what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too",
        examples=["3"],
    )
    micro_batch: of.AutoWhole = Field(
        default="auto", description="sequences of one forward; part of the run's identity", examples=["4"]
    )
    accumulation: of.AutoWhole = Field(
        default="auto", description="micro-batches of one rank in an optimizer step", examples=["2"]
    )
    replicate: of.Whole = Field(default=1, description="groups of ranks that each hold all shards", examples=["1"])
    remat: Literal["auto", "none", "full"] = Field(
        default="auto", description="recompute each block in backward", examples=["full"]
    )


class RunSection(Section):
    """How long, from which seed, and what is kept where."""

    steps: of.OptionalWhole = Field(
        default=None, description="optimizer steps; one of steps, epochs, tokens", examples=["1000"]
    )
    epochs: of.OptionalWhole = Field(default=None, description="passes over the text", examples=["2"])
    tokens: of.TokenCount = Field(default=None, description="tokens to train on", examples=["2Gtok"])
    seed: of.Seed = Field(default=0, description="seed of initial values, order and dropout", examples=["0"])
    dir: of.Text = Field(description="folder of checkpoints, plan and logs", examples=["runs/demo"])
    save_every: of.Period = Field(
        default=parse("10min"),
        description="time, steps or share of the run between checkpoints; none: only at the end",
        examples=["10min"],
    )
    keep: of.Whole = Field(default=2, description="newest checkpoints to keep", examples=["2"])
    eval_every: of.OptionalPace = Field(
        default=parse("10%"),
        description="steps or share of the run between evaluations; none: only at the end",
        examples=["10%"],
    )
    log_every: of.Whole = Field(default=1, description="optimizer steps between log lines", examples=["10"])
    procs: of.AutoWhole = Field(
        default="auto", description="ranks to start on this host; auto: one a GPU, else one", examples=["2"]
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [key for key in ("steps", "epochs", "tokens") if getattr(self, key) is not None]
        if len(given) != 1:
            said = (
                f"{' and '.join(given)} are given together" if given else "neither steps nor epochs nor tokens is given"
            )
            raise broken_rule(
                given[-1] if given else "", f"{said}: give exactly one of run.steps, run.epochs, run.tokens"
            )
        return self


class Recipe(Section):
    """A whole recipe. Make one with `paceline.recipe.load`, which knows where each value comes from."""

    model: Annotated[DecoderModel | TargetModel, Field(discriminator="kind", description="the model")]
    data: DataSection = Field(description="the text")
    task: TaskSection = Field(default_factory=TaskSection, description="what is learnt")
    optim: OptimSection = Field(description="optimizer, global batch, schedule")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="how the work is spread")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="compute precision; master values are fp32 always", examples=["bf16"]
    )
    run: RunSection = Field(description="how long, what is kept where")

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """`parallel: auto` is an empty section, and a decoder's context is the sequence length if nothing else is said."""
        if not isinstance(values, dict):
            return values
        filled = dict(cast("dict[str, Any]", values))
        if filled.get("parallel") == "auto":
            filled["parallel"] = {}
        if isinstance(filled.get("model"), dict) and isinstance(filled.get("data"), dict):
            model, data = cast("dict[str, Any]", filled["model"]), cast("dict[str, Any]", filled["data"])
            try:
                length = of.whole(data.get("sequence_length"), least=2)
            except ValueError:
                length = 2  # told once, for its own key
            if model.get("kind") == "decoder":
                filled["model"] = {"context": length, **model}
        return filled

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if isinstance(self.model, DecoderModel) and self.model.context < self.data.sequence_length:
            raise broken_rule(
                "model.context",
                f"sequences of {self.data.sequence_length} tokens (data.sequence_length) are longer than the context "
                f"of the model, {self.model.context}: raise model.context or shorten the sequences",
            )
        parallel = self.parallel
        if self.optim.global_batch == "auto" and "auto" in (parallel.micro_batch, parallel.accumulation):
            raise broken_rule(
                "optim.global_batch",
                "auto needs both parallel.micro_batch and parallel.accumulation: give those, or a global batch like 64ktok",
            )
        return self

    def origin(self, key: str) -> str:
        """Return where the value of a dotted key comes from: `recipes/x.yaml:12`, an override, or `default`.

        Raises:
            InputError: there is no such key.
        """
        if key in self._origins:
            return self._origins[key]
        known = [name for name, _ in self.values()]
        if not any(name == key or name.startswith(f"{key}.") for name in known):
            near = nearest_name(key, known)
            raise InputError(f"The recipe has no key {key!r}." + (f" Did you mean {near!r}?" if near else ""))
        return "default"

    def model_post_init(self, context: Any, /) -> None:
        """Keep the origins that `load` hands over as validation context."""
        if isinstance(context, Mapping):
            self._origins = cast("Mapping[str, str]", context)

    def values(self) -> list[tuple[str, Any]]:
        """Return each leaf value with its dotted key, in the order of the schema."""
        return list(_leaves(self, ""))

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON-able data; `paceline.recipe.from_dict` reads it back."""
        return _plain(self)


def _differs(section: Section, key: str) -> bool:
    """Whether a key was given a value other than its default: a stored recipe spells the defaults out."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, Quantity) else value


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
