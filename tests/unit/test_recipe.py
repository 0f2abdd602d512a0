"""The recipe: typed, strict, and each fault told with file, line, key, value, rule and remedy."""

from pathlib import Path
from textwrap import dedent

import pytest

from paceline.core.errors import InputError
from paceline.core.quantity import parse
from paceline.recipe import DecoderModel, Recipe, TargetModel, from_dict, known_keys, load

ROOT = Path(__file__).resolve().parents[2]

GOOD = """\
model: {kind: decoder, dim: 64, layers: 2, heads: 4}
data: {train: stdlib, sequence_length: 128}
optim:
  lr: 3e-4
  global_batch: 64seq
run: {steps: 10, dir: runs/x}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(write(folder, text), list(overrides))
    return str(caught.value).replace(str(folder) + "/", "")


def good(folder: Path, *overrides: str) -> Recipe:
    return load(write(folder, GOOD), list(overrides))


def test_a_good_recipe_has_typed_values_and_derived_ones(tmp_path: Path) -> None:
    recipe = good(tmp_path)
    assert isinstance(recipe.model, DecoderModel)
    assert (recipe.model.kv_heads, recipe.model.ffn, recipe.model.context) == (4, 192, 128)
    assert recipe.optim.lr == 3e-4
    assert recipe.optim.global_batch == parse("64seq")
    assert recipe.optim.weight_decay == 0.1
    assert recipe.optim.schedule.warmup == parse("3%")
    assert recipe.data.train == ("stdlib",)
    assert recipe.parallel.stage == "auto"
    assert recipe.run.save_every == parse("10min")


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="frozen"):
        good(tmp_path).optim.lr = 1.0  # type: ignore[misc]


def test_i82_a_misspelt_key_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    text = GOOD.replace("  lr: 3e-4\n", "  lr: 3e-4\n  clipp: 1.0\n")
    assert (
        refused(tmp_path, text) == "recipe.yaml:5: optim.clipp: unknown key 'clipp' (value 1.0): did you mean 'clip'?"
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("precison: bf16", "did you mean 'precision'?"),
        ("clip: 1.0", "it belongs to another section: optim.clip"),
        ("warmup: 3%", "it belongs to another section: optim.schedule.warmup"),
        ("gradient_clipping: 1.0", "here it is called optim.clip"),
        ("zero_stage: 3", "here it is called parallel.stage"),
        ("per_device_train_batch_size: 3", "here it is called parallel.micro_batch"),
        ("xyzzy: 3", "known here: model, data, task, optim, parallel, precision, run"),
    ],
)
def test_i82_advice_for_unknown_keys(tmp_path: Path, line: str, says: str) -> None:
    message = refused(tmp_path, GOOD + line + "\n")
    key = line.partition(":")[0]
    assert message.startswith(f"recipe.yaml:7: {key}: unknown key {key!r} (value ")
    assert says in message


def test_all_faults_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
    model:
      kind: decoder
      dim: 64
      layres: 8
      heads: eight
    data: {train: stdlib, sequence_length: 8.5}
    optim:
      lr: 3e-4
      lr: 1
      name: adamv
      global_batch: 64
    run: {steps: 010, save_every: 10}
    """
    assert refused(tmp_path, dedent(text), "parallel.stage=4").splitlines() == [
        "recipe.yaml has 11 errors:",
        "recipe.yaml:1: model.layers is missing: add `layers: 8`.",
        "recipe.yaml:4: model.layres: unknown key 'layres' (value 8): did you mean 'layers'?",
        "recipe.yaml:5: model.heads: 'eight': must be a whole number of at least 1, for example `heads: 8`.",
        "recipe.yaml:6: data.sequence_length: 8.5: must be a whole number of at least 2, for example `sequence_length: 256`.",
        "recipe.yaml:9: optim.lr: the key is said twice (first at recipe.yaml:8), now with the value '1': keep one of them.",
        (
            "recipe.yaml:10: optim.name: 'adamv' is not one of adamw, adam, nadam, radam, adamax, adagrad, rmsprop, sgd, did you "
            "mean 'adam'?"
        ),
        (
            "recipe.yaml:11: optim.global_batch: 64: has no unit, and without one its meaning is open: write it like 64ktok or "
            "32seq, or auto."
        ),
        "recipe.yaml:12: run.steps: '010': must be a whole number of at least 1, for example `steps: 1000`.",
        "recipe.yaml:12: run.dir is missing: add `dir: runs/demo`.",
        (
            "recipe.yaml:12: run.save_every: 10: has no unit, and without one its meaning is open: write it like 100steps or 3% or "
            "30min."
        ),
        "override 'parallel.stage=4': parallel.stage: 4: must be a ZeRO stage: 0, 1, 2, 3, or auto, for example `stage: 3`.",
    ]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr='3e-4'", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("run.steps='8'", "run.steps", 8),
        ("run.steps=1e4", "run.steps", 10_000),
        ("run.steps=1_000", "run.steps", 1000),
        ("data.packing=no", "data.packing", False),
        ("data.packing=false", "data.packing", False),
        ("data.packing='true'", "data.packing", True),
        ("data.text_key=no", "data.text_key", "no"),
        ("data.text_key=on", "data.text_key", "on"),
        ("data.text_key=1:30", "data.text_key", "1:30"),
        ("data.text_key=2024-01-01", "data.text_key", "2024-01-01"),
        ("data.train=[a.txt, b.jsonl]", "data.train", ("a.txt", "b.jsonl")),
        ("data.eval=none", "data.eval", None),
        ("data.eval=held.txt", "data.eval", ("held.txt",)),
        ("optim.clip=none", "optim.clip", None),
        ("optim.clip=", "optim.clip", None),
        ("optim.betas=[0.9, 0.99]", "optim.betas", (0.9, 0.99)),
        ("parallel.stage='3'", "parallel.stage", 3),
        ("parallel.remat=none", "parallel.remat", "none"),
        ("optim.schedule.warmup=100steps", "optim.schedule.warmup", parse("100steps")),
    ],
)
def test_i83_clean_spellings_mean_the_same(tmp_path: Path, override: str, key: str, value: object) -> None:
    recipe = good(tmp_path, override)
    assert dict(recipe.values())[key] == value
    assert type(dict(recipe.values())[key]) is type(value)
    assert recipe.origin(key) == f"override {override!r}"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.steps=true", "run.steps: True: must be a whole number of at least 1"),
        ("run.steps=8.5", "run.steps: 8.5: must be a whole number"),
        ("run.steps=0", "run.steps: 0: must be at least 1"),
        ("optim.lr=true", "optim.lr: True: must be a finite number"),
        ("optim.lr=.nan", "optim.lr: '.nan': must be a finite number"),
        ("optim.lr=nan", "optim.lr: 'nan': must be a finite number"),
        ("optim.lr=0", "optim.lr: 0: must be above 0"),
        ("optim.lr=-1e-3", "optim.lr: -0.001: must be above 0"),
        ("optim.betas=[0.9]", "optim.betas: [0.9]: must be two numbers, such as [0.9, 0.95]"),
        ("optim.betas=[0.9, 1.0]", "must be two numbers below 1"),
        ("data.packing=1", "data.packing: 1: must be true or false"),
        ("data.train=2024", "data.train: 2024: must be a path, a list of paths, or stdlib"),
        ("data.train=[]", "must be a path, a list of paths, or stdlib"),
        ("data.text_key=5", 'data.text_key: 5: must be a text; in quotes it would be one: "5"'),
        ("data.eval=100%", "must lie between 0% and 100%"),
        ("optim.global_batch=0seq", "optim.global_batch: '0seq': must be more than zero, or auto"),
        ("optim.global_batch=1.5seq", "1.5seq is not a whole number of sequences"),
        ("optim.global_batch=3GiB", "counts bytes, but tokens or sequences are wanted here"),
        ("optim.schedule.warmup=110%", "must be at most 100%"),
        ("parallel.stage=true", "parallel.stage: True: must be a ZeRO stage"),
        ("parallel.remat=fall", "is not one of auto, none, full, did you mean 'full'?"),
        ("precision=fp16", "precision: 'fp16' is not one of auto, fp32, bf16"),
        ("parallel=3", "parallel: the section is 3, but it must be a mapping with keys such as stage"),
        ("optim=", "optim: the section is empty, but it must be a mapping with keys such as name, lr"),
        ("model={}", "model.kind is missing: add `kind: decoder` (ours) or `kind: target`"),
        ("model.kind=decodr", "model.kind: 'decodr' is not a kind of model, did you mean 'decoder'?"),
        ("model.heads=7", "model.heads: 7 heads do not divide dim 64"),
        ("model.kv_heads=3", "model.kv_heads: 3 kv_heads do not divide 4 heads"),
        ("model.heads=64", "model.heads: a head is 1 wide, but rotary positions need an even width"),
        ("model.dropout=1.0", "model.dropout: dropout 1 drops everything"),
        (
            "model.context=64",
            "model.context: sequences of 128 tokens (data.sequence_length) are longer than the context",
        ),
        (
            "optim.momentum=0.9",
            "optim.momentum: adamw has no momentum and would ignore this: drop it (used by sgd, rmsprop)",
        ),
        ("optim.schedule.decay=30%", "optim.schedule.decay: shape cosine has no decay part"),
        ("run.epochs=3", "run.epochs: steps and epochs are given together: give exactly one"),
        ("run.steps=none", "neither steps nor epochs nor tokens is given"),
        ("optim.global_batch=auto", "auto needs both parallel.micro_batch and parallel.accumulation"),
        ("optim.lr", "an override is written key=value, such as optim.lr=1e-3"),
        ("=3", "an override is written key=value"),
        ("optim..lr=3", "an override is written key=value"),
        ("optim.lr.peak=3", "optim.lr is the value 0.0003, it has no keys below it"),
        ("run.dir=[1", "not valid YAML"),
        ("run.dir=!!python/object:os.system x", "is not allowed: a recipe is plain values"),
        ("optim.learning_rte=3", "unknown key 'learning_rte'"),
    ],
)
def test_i83_what_means_something_else_is_refused(tmp_path: Path, override: str, says: str) -> None:
    message = refused(tmp_path, GOOD, override)
    assert says in message
    rule_about_another_key = ("neither" in says, "longer than" in says)
    assert f"override {override!r}" in message or any(rule_about_another_key)


def test_i83_each_value_has_an_origin(tmp_path: Path) -> None:
    recipe = good(tmp_path, "optim.schedule={shape: linear, warmup: 5%}", "optim.lr=1e-3", "optim.lr=2e-3")
    path = str(tmp_path / "recipe.yaml")
    assert recipe.origin("model.dim") == f"{path}:1"
    assert recipe.origin("optim.global_batch") == f"{path}:5"
    assert recipe.origin("optim.clip") == "default"
    assert recipe.origin("optim.schedule.final") == "default"
    assert recipe.origin("optim.lr") == "override 'optim.lr=2e-3'"
    assert recipe.origin("optim.schedule.warmup") == "override 'optim.schedule={shape: linear, warmup: 5%}'"
    assert recipe.origin("optim") == f"{path}:3"
    with pytest.raises(InputError, match=r"has no key 'optim.lrr'. Did you mean 'optim.lr'\?"):
        recipe.origin("optim.lrr")


def test_i83_one_source_of_truth_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    assert "here it is called data.tokenizer.vocab_size" in refused(tmp_path, GOOD, "model.vocab_size=100")


def test_an_override_in_a_shared_alias_changes_one_place_only(tmp_path: Path) -> None:
    text = GOOD.replace("run:", "task: &t {kind: pretrain}\nrun:").replace(
        "train: stdlib", "train: &s [a.txt], eval: *s"
    )
    recipe = load(write(tmp_path, text), ["data.train=b.txt"])
    assert (recipe.data.train, recipe.data.eval) == (("b.txt",), ("a.txt",))


def test_parallel_auto_is_short_for_all_auto(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, GOOD + "parallel: auto\n"))
    assert recipe.parallel.stage == "auto"
    assert load(write(tmp_path, GOOD + "parallel: auto\n"), ["parallel.stage=2"]).parallel.stage == 2


def test_a_target_model_names_a_callable(tmp_path: Path) -> None:
    recipe = good(tmp_path, "model={kind: target, target: 'my.module:build', arguments: {width: 3}}")
    assert isinstance(recipe.model, TargetModel)
    assert recipe.model.arguments == {"width": 3}
    assert (
        recipe.origin("model.arguments")
        == "override \"model={kind: target, target: 'my.module:build', arguments: {width: 3}}\""
    )
    assert "does not name a callable" in refused(tmp_path, GOOD, "model={kind: target, target: my.module}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "recipe.yaml is empty: a recipe has the sections model, data, optim and run."),
        ("# only a comment\n", "recipe.yaml is empty"),
        ("- a\n- b\n", "recipe.yaml:1: the file holds a list, but a recipe is a mapping"),
        ("hello\n", "the file holds the single value 'hello'"),
        ("model:\n\tkind: decoder\n", "recipe.yaml:2:1: not valid YAML: a tab is used for indentation: use spaces."),
        ("a: b: c\n", "recipe.yaml:1:5: not valid YAML: a second `: ` on this line"),
        ("a: [1, 2\n", "recipe.yaml:2:1: not valid YAML: expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "a recipe is one document"),
        ("? [a]\n: 1\n", "recipe.yaml:1: a key must be a plain name"),
        ("a: &a {x: 1}\nb: {<<: *a}\n", "recipe.yaml:2: merge keys (<<) are not supported"),
        ("a: &a [*a]\n", "recipe.yaml:1: the alias here contains itself"),
        ("a: !!python/object/apply:os.system [ls]\n", "is not allowed: a recipe is plain values"),
        ("a: \x00\n", "not valid YAML"),
        ("{" * 3000, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


def test_aliases_cannot_blow_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    assert "expands to more than 100000 values" in refused(tmp_path, "\n".join(lines))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(InputError, match=r"There is no recipe file .*recipe\.yml: did you mean .*recipe\.yaml\?"):
        load(tmp_path / "recipe.yml")
    with pytest.raises(InputError, match="relative to the current folder"):
        load("no/such/folder/x.yaml")
    with pytest.raises(InputError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    with pytest.raises(InputError, match=r"is not UTF-8 text \(byte 3\)"):
        load(tmp_path / "latin.yaml")


def test_missing_sections_are_told_with_what_to_add(tmp_path: Path) -> None:
    assert refused(tmp_path, "precision: fp32\n").splitlines()[1:] == [
        "recipe.yaml: the section 'model' is missing: add `model: {kind: decoder, dim: 256, layers: 8, heads: 8}`.",
        "recipe.yaml: the section 'data' is missing: add `data: {train: stdlib, sequence_length: 256}`.",
        "recipe.yaml: the section 'optim' is missing: add `optim: {lr: 3e-4, global_batch: 64ktok}`.",
        "recipe.yaml: the section 'run' is missing: add `run: {dir: runs/demo}`.",
    ]


def test_a_recipe_survives_json(tmp_path: Path) -> None:
    for overrides in ([], ["optim.name=sgd", "optim.momentum=0.9"], ["optim.schedule={shape: wsd, decay: 10%}"]):
        recipe = good(tmp_path, *overrides)
        again = from_dict(recipe.as_dict(), "run.json")
        assert again.as_dict() == recipe.as_dict()
        assert again.origin("optim.lr") == "run.json"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_the_recipes_we_ship_are_right_and_say_how_to_run_them(path: Path) -> None:
    load(path)
    header = path.read_text().split("\nmodel:")[0]
    assert f"paceline train recipes/{path.name}" in header
    assert "Expect" in header


def test_the_surface_is_frozen() -> None:
    """A key is a promise: adding one is a decision, removing or renaming one breaks recipes."""
    assert [key.name for key in known_keys()] == SURFACE.split()
    for key in known_keys():
        assert key.description and key.example, key


SURFACE = """
model.kind model.dim model.layers model.heads model.kv_heads model.ffn model.context model.tied model.dropout
model.rope_theta model.norm_eps model.target model.arguments
data.train data.eval data.sequence_length data.packing data.text_key data.tokenizer.vocab_size data.tokenizer.file data.cache
task.kind
optim.name optim.lr optim.betas optim.eps optim.momentum optim.weight_decay optim.clip optim.global_batch
optim.schedule.shape optim.schedule.warmup optim.schedule.decay optim.schedule.final
parallel.stage parallel.micro_batch parallel.accumulation parallel.replicate parallel.remat
precision
run.steps run.epochs run.tokens run.seed run.dir run.save_every run.keep run.eval_every run.log_every run.procs
"""
