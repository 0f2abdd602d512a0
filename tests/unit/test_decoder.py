"""The decoder equals transformers' Llama on the same weights, and packed documents do not see each other."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.targets import IGNORE
from paceline.models import Decoder, DecoderConfig

BASE = dict(vocab_size=61, dim=32, layers=2, heads=4, kv_heads=4, ffn=48, context=24)


def decoder(**changes):
    return Decoder(DecoderConfig(**{**BASE, **changes}), seed=3)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"tied": True}, {"kv_heads": 1, "tied": True}])
def test_logits_equal_transformers(changes):
    model = decoder(**changes)
    other = LlamaForCausalLM(LlamaConfig(**model.config.to_hf()))
    other.load_state_dict(model.state_dict(), strict=True)
    tokens = torch.randint(0, 61, (2, 24))
    assert (other(tokens).logits - model(tokens)).abs().max() < 1e-5


def test_loss_is_the_sum_over_counted_targets():
    model = decoder()
    tokens = torch.randint(0, 61, (2, 8))
    targets = torch.randint(0, 61, (2, 8))
    targets[0, :5] = IGNORE
    each = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none"
    )
    expected = each[targets.flatten() != IGNORE].sum()
    assert model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_packed_document_is_computed_as_if_alone():
    model = decoder().double()
    first, second = torch.randint(0, 61, (1, 9)), torch.randint(0, 61, (1, 7))
    packed = torch.cat((first, second), dim=1)
    segments = torch.tensor([[1] * 9 + [2] * 7])
    logits = model(packed, segments_BT=segments)
    assert (logits[:, 9:] - model(second)).abs().max() < 1e-12
    assert (logits[:, :9] - model(first)).abs().max() < 1e-12
    changed = packed.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 61
    assert torch.equal(model(changed, segments_BT=segments)[:, 9:], logits[:, 9:])


def test_values_do_not_depend_on_the_global_random_state():
    torch.manual_seed(1)
    one = decoder()
    torch.manual_seed(2)
    two = decoder()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, Decoder(one.config, seed=4).lm_head.weight)


def test_I43_rotary_tables_stay_fp32_in_bf16():
    """A table that was rounded to bf16 would move late positions; it is cast where it is used."""
    model = decoder()
    exact = model.cos_TE.clone()
    assert "cos_TE" not in model.state_dict()
    tokens = torch.randint(0, 61, (1, 24))
    assert torch.isfinite(model(tokens)).all()
    assert torch.equal(model.cos_TE, exact)
