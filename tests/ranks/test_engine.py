"""The engine's cases on several ranks. Bodies are in engine_cases.py; ids are those of the field cases."""

import engine_cases as cases
import engine_refusals as refusals
import pytest
from harness import ranks, run

STAGES = pytest.mark.parametrize("stage", range(4))


def same(results):
    """All ranks say the same, which is returned."""
    assert all(result == results[0] for result in results), results
    return results[0]


@STAGES
@ranks(1, 2)
def test_I01_divisor_is_the_tokens_of_the_whole_step(world, stage):
    gradient, norm, loss = same(run(world, cases.token_divisor, stage))
    assert gradient == pytest.approx(9.333333, abs=1e-6)  # 84 / 9; means of means give 12.83 and 10.75
    assert norm == pytest.approx(9.333333, abs=1e-6)
    assert loss == pytest.approx(4.666667, abs=1e-6)


@STAGES
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
@ranks(1, 2)
def test_I02_I07_norm_ratio_is_one(world, accumulation, stage):
    """With and without the accumulation hint; f32 rounding of sums of a few hundred terms is below 1e-6."""
    assert same(run(world, cases.norm_ratio, stage, accumulation)) == pytest.approx((1.0, 1.0), abs=1e-6)


@STAGES
@ranks(1, 2, 4)
def test_I12_every_rank_reports_the_whole_norm(world, stage):
    assert same(run(world, cases.unit_norm, stage)) == 4.0


@STAGES
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
@ranks(1, 2)
def test_I18_master_weights_are_fp32(world, stage, loaded):
    weight, said = same(run(world, cases.master_weight, stage, loaded))
    assert weight == pytest.approx(0.99, abs=1e-5)  # a bf16 weight would stay at 1.0
    assert "gradient dtype bfloat16, sums, master and moments float32" in said


@STAGES
@ranks(1, 2)
def test_I20_gradients_accumulate_in_fp32(world, stage):
    assert same(run(world, cases.bf16_accumulation, stage)) == pytest.approx(10.0, abs=0.02)  # bf16 sums end at 4.0


@STAGES
@ranks(1, 2, 3)
def test_I21_I22_I27_I29_frozen_bf16_base_with_fp32_adapters(world, stage):
    worst, states, frozen_masters, said = run(world, cases.adapters, stage)[0]
    assert worst < 1e-6
    assert not any("base" in name for name in states)
    assert frozen_masters == 0
    assert "64 trainable, 128 frozen" in said


@STAGES
@pytest.mark.parametrize("remat", ["none", "full"])
@ranks(1, 2, 3, 4)
def test_I05_I24_I32_I33_I35_odd_parameters(world, stage, remat):
    """Tied, frozen, unused, reused, tiny, 0-dim, zero-size, mixed-dtype, non-contiguous: equal to one process under SGD."""
    assert max(run(world, cases.odd_parameters, stage, remat)) < 1e-6


@STAGES
@ranks(1, 2, 4)
def test_I30_ranks_may_take_different_branches(world, stage):
    assert max(run(world, cases.data_dependent_branch, stage)) < 1e-6


@STAGES
@ranks(1, 2, 4)
def test_I31_idle_experts(world, stage):
    assert max(run(world, cases.idle_experts, stage)) < 1e-6


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@ranks(1, 2)
def test_I33_I40_the_users_own_checkpointing(world, stage, reentrant, reuse):
    assert max(run(world, cases.user_checkpointing, stage, reentrant, reuse)) < 1e-6


@ranks(1, 2, 3)
def test_I35_parameters_smaller_than_the_world(world):
    norm, moved, shape, equal = same(run(world, cases.small_parameters))
    assert norm == pytest.approx(1.7320508, abs=1e-6)
    assert moved[0] == pytest.approx([0.9, 0.9, 0.9], abs=1e-6)
    assert tuple(shape) == (5, 2)
    assert equal


@ranks(1, 2)
def test_I38_I39_a_sharded_weight_is_refused_by_name_and_keeps_its_shape(world):
    said, equal, (count, shapes) = same(run(world, cases.read_outside))
    assert all("'layers." in text and "engine.full(" in text for text in said), said
    assert equal
    assert count == 40
    assert shapes == [(4, 4), (4,), (4, 4), (4,)]


@STAGES
@ranks(2, 3)
def test_I65_uneven_batches_join_with_weight_zero(world, stage):
    worst, count = same(run(world, cases.uneven_batches, stage))
    assert worst < 1e-6
    assert count == 3 + 2 * (world - 1)


@STAGES
@ranks(1, 2, 3)
def test_I08_I09_a_short_window_divides_by_its_own_length(world, stage):
    windows, steps, ratio = same(run(world, cases.short_window, stage))
    assert windows == [4, 4, 2]
    assert steps == 3
    assert ratio == pytest.approx(1.0, abs=1e-6)


@STAGES
@ranks(1, 2)
def test_the_callers_random_stream_is_left_alone(world, stage):
    assert all(run(world, refusals.shared_stream, stage))


@ranks(2)
def test_different_models_are_refused_by_name(world):
    said = same(run(world, refusals.different_models))
    assert "'up.weight'" in said
    assert "initial values" in said


@STAGES
@ranks(1, 2)
def test_evaluation_between_steps_changes_nothing(world, stage):
    without, between = run(world, refusals.evaluation_between_steps, stage)[0]
    assert without == between


@STAGES
@ranks(1, 2)
def test_a_backward_beyond_the_window_is_refused(world, stage):
    assert "one backward more than the 2 micro-batches" in same(run(world, refusals.surplus_backward, stage))


@ranks(2)
def test_wrong_use_is_refused(world):
    said = same(run(world, refusals.wrong_use))
    for text, part in zip(
        said,
        ("no gradient to apply", "call it first", "does not depend", "counts no token", "whole matrices"),
        strict=True,
    ):
        assert part in text, said


@ranks(2)
def test_paths_that_part_are_refused_before_an_update(world):
    said, unchanged = same(run(world, refusals.different_reuse))
    assert "'layers.0' on rank 0" in said
    assert "'layers.1' on rank 1" in said
    assert "nothing was updated" in said
    assert unchanged


@ranks(1, 2)
def test_a_gradient_that_is_not_finite_names_its_parameter(world):
    said, unchanged = same(run(world, refusals.not_finite))
    assert "down.weight" in said
    assert unchanged
