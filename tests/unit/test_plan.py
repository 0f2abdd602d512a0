"""The plan: state bytes by stage, the batch identity, and every auto resolved with a reason."""

import json
from pathlib import Path

import pytest

from paceline.core.errors import DoesNotFit, InputError
from paceline.plan import Plan, decoder_census, model_states, recipe_census, resolve
from paceline.recipe import DecoderModel, Recipe, load

GOOD = """\
model: {kind: decoder, dim: 64, layers: 2, heads: 4}
data: {train: stdlib, sequence_length: 128, tokenizer: {vocab_size: 1000}}
optim: {lr: 3e-4, global_batch: 64seq}
run: {steps: 10, dir: runs/x}
"""
GIB = 1024**3


@pytest.fixture
def recipe(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(GOOD)
    return lambda *overrides: load(path, list(overrides))


def planned(recipe: Recipe, world: int = 2, memory: int = 8 * GIB, fast: bool = True, **more) -> Plan:
    return resolve(recipe, world=world, memory_bytes=memory, bf16_fast=fast, **more)


@pytest.mark.parametrize(("stage", "whole", "shared"), [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_i85_bytes_of_states_with_bf16_gradients(stage: int, whole: int, shared: int, ranks: int) -> None:
    elements = 64_000
    states = model_states(elements, ranks, stage, precision="bf16", gradient_bytes=2)
    assert states.total == whole * elements + shared * elements // ranks


@pytest.mark.parametrize(("stage", "whole", "shared"), [(0, 18, 0), (1, 6, 12), (2, 2, 16), (3, 0, 18)])
def test_i85_f32_gradients_add_two_bytes_where_gradients_sit(stage: int, whole: int, shared: int) -> None:
    states = model_states(64_000, 4, stage, precision="bf16")
    assert states.total == whole * 64_000 + shared * 16_000


def test_i85_published_figures() -> None:
    """The ZeRO paper, figure 1: 7.5B parameters on 64 ranks, in GB."""
    found = [
        model_states(7_500_000_000, 64, stage, precision="bf16", gradient_bytes=2).total / 1e9 for stage in range(4)
    ]
    assert found == pytest.approx([120.0, 31.4, 16.6, 1.88], abs=0.05)


def test_fp32_weights_are_their_own_master() -> None:
    states = model_states(100, 1, 0, precision="fp32")
    assert states.as_dict() == {"weights": 400, "gradients": 400, "master": 0, "moments": 800}
    assert model_states(10, 4, 3, precision="fp32", moments=0).as_dict() == {
        "weights": 12, "gradients": 12, "master": 0, "moments": 0,
    }  # fmt: skip


def test_decoder_parameters_by_hand(recipe) -> None:
    model = recipe("model.kv_heads=2", "model.ffn=100").model
    assert isinstance(model, DecoderModel)
    attention = 64 * 64 + 64 * 32 * 2 + 64 * 64
    block = attention + 3 * 64 * 100 + 2 * 64
    assert decoder_census(model, 1000).parameters == 2 * block + 2 * 1000 * 64 + 64
    tied = recipe("model.kv_heads=2", "model.ffn=100", "model.tied=true")
    assert recipe_census(tied).parameters == 2 * block + 1000 * 64 + 64


@pytest.mark.parametrize(
    ("overrides", "world", "micro", "accumulation", "total"),
    [
        (("parallel.micro_batch=4",), 2, 4, 8, 64),
        (("parallel.accumulation=8",), 2, 4, 8, 64),
        (("parallel.micro_batch=4", "parallel.accumulation=8"), 2, 4, 8, 64),
        (("parallel.micro_batch=4", "parallel.accumulation=8", "optim.global_batch=auto"), 2, 4, 8, 64),
        (("parallel.micro_batch=4", "parallel.accumulation=8", "optim.global_batch=auto"), 3, 4, 8, 96),
        (("optim.global_batch=8192tok", "parallel.micro_batch=4"), 2, 4, 8, 64),
        (("optim.global_batch=9ktok", "parallel.micro_batch=5"), 2, 5, 7, 70),
        (("parallel.micro_batch=4",), 3, 4, 6, 64),
        (("parallel.micro_batch=64",), 4, 64, 1, 64),
    ],
)
def test_i84_two_of_the_three_give_the_third(recipe, overrides, world, micro, accumulation, total) -> None:
    plan = planned(recipe(*overrides), world)
    assert (plan.micro_batch, plan.accumulation, plan.global_sequences) == (micro, accumulation, total)
    assert plan.micro_batches == total // micro


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("total", [1, 5, 7, 12, 64, 96, 100])
def test_i84_auto_holds_the_identity_and_leaves_no_rank_idle_that_could_work(recipe, world: int, total: int) -> None:
    plan = planned(recipe(f"optim.global_batch={total}seq"), world)
    assert plan.micro_batch * plan.micro_batches == total
    assert (plan.accumulation - 1) * world < plan.micro_batches <= plan.accumulation * world
    assert plan.micro_batches >= min(total, world)
    if total % world == 0:
        assert plan.micro_batches % world == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("optim.global_batch=256seq", "parallel.micro_batch=4", "parallel.accumulation=8"),
            (
                "256 sequences (optim.global_batch: given (override 'optim.global_batch=256seq')) are not micro_batch 4 x accumulation "
                "8 x world 1 (no launcher) = 32: leave parallel.accumulation or parallel.micro_batch auto, or write global_batch: 32seq."
            ),
        ),
        (("parallel.micro_batch=6",), "6 does not divide the 64 sequences of the global batch"),
        (("parallel.micro_batch=6",), "choose one of 1, 2, 4, 8, 16, 32, 64"),
        (("parallel.accumulation=6",), "cannot be cut into accumulation 6 x world 1 (no launcher) equal micro-batches"),
        (("optim.global_batch=100tok",), "100tok is less than one sequence of 128 tokens (data.sequence_length)"),
        (("parallel.replicate=2",), "parallel.replicate: 2 does not divide the world of 1 (no launcher)"),
    ],
)
def test_i84_what_does_not_add_up_names_the_world_and_how_it_was_found(recipe, overrides, says) -> None:
    with pytest.raises(InputError) as caught:
        planned(recipe(*overrides), 1, world_source="no launcher")
    assert says in str(caught.value)
    assert str(caught.value).startswith("override ")


def test_tokens_are_cut_into_whole_sequences_and_this_is_said(recipe) -> None:
    plan = planned(recipe("optim.global_batch=64ktok", "data.sequence_length=1024"))
    assert plan.global_sequences == 62
    assert "rounded down to 63488 tokens" in plan.settings["optim.global_batch"].reason


def test_uneven_and_idle_ranks_are_said(recipe) -> None:
    plan = planned(recipe("optim.global_batch=7seq", "parallel.micro_batch=1"), 2)
    assert "1 of 2 ranks take one more than the others" in plan.settings["parallel.accumulation"].reason
    plan = planned(recipe("optim.global_batch=3seq"), 4)
    assert "1 of 4 ranks have nothing to compute" in plan.settings["parallel.accumulation"].reason


def test_precision_follows_the_processor_unless_it_is_said(recipe) -> None:
    assert planned(recipe(), fast=True).precision == "bf16"
    assert (
        planned(recipe(), fast=False, bf16_reason="no flag").settings["precision"].reason
        == "bf16 is not quick here (no flag)"
    )
    assert planned(recipe("precision=bf16"), fast=False).precision == "bf16"


def test_the_stage_rises_as_memory_shrinks(recipe) -> None:
    """A model of 100M parameters on 4 ranks: less memory, higher stage, then remat, then a clear refusal."""
    big = recipe("optim.global_batch=4seq")
    found: list[tuple[int, str]] = []
    for mib in range(3000, 500, -20):
        try:
            plan = planned(big, 4, mib * 1024**2, parameters=100_000_000)
        except DoesNotFit as error:
            said = str(error)
            break
        assert sum(plan.memory.values()) <= plan.memory_available
        found.append((plan.stage, plan.remat))
    else:
        pytest.fail("it always fitted")
    assert "largest: " in said
    assert "each of 4 ranks" in said
    assert [stage for stage, _ in found] == sorted(stage for stage, _ in found)
    assert {stage for stage, _ in found} >= {0, 1, 2}
    assert found[0] == (0, "none")


def test_one_rank_shards_nothing_and_a_given_stage_is_kept(recipe) -> None:
    assert planned(recipe(), 1).stage == 0
    assert planned(recipe("parallel.stage=3"), 1).stage == 3
    with pytest.raises(DoesNotFit, match="at stage 0 with remat none"):
        planned(recipe("parallel.stage=0", "parallel.remat=none"), 4, GIB, parameters=100_000_000)


def test_every_setting_has_a_reason_and_the_plan_survives_json(recipe, tmp_path: Path) -> None:
    plan = planned(recipe(), 3, world_source="WORLD_SIZE")
    assert set(plan.settings) == {
        "precision", "optim.global_batch", "parallel.stage", "parallel.micro_batch", "parallel.accumulation",
        "parallel.replicate", "parallel.remat",
    }  # fmt: skip
    assert all(item.reason for item in plan.settings.values())
    path = tmp_path / "run" / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["settings"]["parallel.stage"] == plan.settings_dict()["parallel.stage"]
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("[]", "holds no mapping"),
        ("{}", "format None"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "is damaged"),
        (
            '{"format": 1, "world": 1, "world_source": "", "settings": {"a": 3}, "memory": {}, "memory_available": 0}',
            "is damaged",
        ),
    ],
)
def test_a_damaged_plan_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_resumed_run_keeps_its_identity_at_any_world(recipe, world: int) -> None:
    kept = planned(recipe(), 2, fast=True)
    plan = planned(recipe(), world, fast=False, kept=kept)
    assert (plan.micro_batch, plan.global_sequences, plan.precision) == (
        kept.micro_batch,
        kept.global_sequences,
        "bf16",
    )
    assert plan.accumulation == -(-kept.micro_batches // world)
    assert "part of the run's identity" in plan.settings["parallel.micro_batch"].reason


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("parallel.micro_batch=1", "parallel.micro_batch: 1 is asked for, but the run that is resumed has 32"),
        ("optim.global_batch=32seq", "optim.global_batch: 32seq is asked for, but the run that is resumed has 64seq"),
        ("precision=fp32", "precision: fp32 is asked for, but the run that is resumed has bf16"),
        ("parallel.accumulation=3", "leave accumulation auto"),
    ],
)
def test_a_resumed_run_refuses_another_identity(recipe, override: str, says: str) -> None:
    kept = planned(recipe(), 2)
    with pytest.raises(InputError) as caught:
        planned(recipe(override), 2, kept=kept)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"override {override!r}")


def test_a_model_of_unknown_size_leaves_stage_and_remat_open_until_it_is_built(recipe) -> None:
    target = recipe("model={kind: target, target: 'm:f'}")
    assert "parallel.stage" not in planned(target).settings
    assert planned(target, parameters=1000).stage == 0
