"""What is exported is what was trained, and transformers loads it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import Mixed, make, one_rank, train
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import paceline
from paceline.checkpoint import export
from paceline.cli.main import main
from paceline.core.errors import InputError, RunFailed
from paceline.models import Decoder, DecoderConfig
from paceline.zero import Engine

CONFIG = dict(vocab_size=96, dim=32, layers=2, heads=4, kv_heads=2, ffn=80, context=16)


def trained(run: Path, *, tied: bool) -> Engine:
    """A run's folder with a checkpoint of a decoder and a tokenizer, as `paceline train` leaves it."""
    config = DecoderConfig(**CONFIG, tied=tied)
    engine = paceline.shard(Decoder(config, seed=1), one_rank(), stage=3)
    optim = engine.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens_BT = torch.arange(24).view(2, 12)
    for _ in range(2):
        engine.backward(engine.module(tokens_BT, tokens_BT.roll(1)), 24)
        optim.step()
    hf = {**config.to_hf(), "eos_token_id": 0}
    run.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0, "a": 1, "b": 2}, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(run / "tokenizer.json"))
    paceline.save(run / "checkpoints", engine, extra={"model": {"hf": hf}, "tokenizer": "tokenizer.json"})
    return engine


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_those_of_transformers(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    engine = trained(tmp_path / "run", tied=tied)
    out = export(tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "out")
    assert sorted(os.listdir(out)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.float32 and theirs.generation_config.eos_token_id == 0
    tokens_BT = torch.randint(0, 96, (3, 11), generator=torch.Generator().manual_seed(0))
    engine.module.eval()
    with torch.no_grad():
        ours, logits = engine.module(tokens_BT), theirs(tokens_BT).logits
    assert (ours - logits).abs().max() < 1e-5 and ours.std() > 0.1
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("b a").input_ids == [2, 1] and tokenizer.eos_token == "<|end|>"


def test_bf16_rounds_each_weight_once(tmp_path: Path) -> None:
    engine = trained(tmp_path / "run", tied=True)
    assert main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, weight in weights.items():
        assert torch.equal(weight, engine.full(name).bfloat16()), name


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """Safetensors alone; both names of tied weights, frozen weights and buffers, in their own dtype where it matters."""
    engine, optim = make(one_rank(), 2)
    train(engine, optim, 1)
    out = export(paceline.save(tmp_path / "run", engine), tmp_path / "out", dtype="bf16")
    assert os.listdir(out) == ["model.safetensors"]
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == Mixed().state_dict().keys()
    assert weights["seen"].dtype == torch.int64 and weights["scale"].dtype == torch.float32
    assert torch.equal(weights["head.weight"], engine.full("embed.weight").bfloat16())
    assert torch.equal(weights["layers.1.frozen.weight"], Mixed().layers[1].frozen.weight.bfloat16())


def test_the_tokenizer_is_looked_for(tmp_path: Path) -> None:
    trained(tmp_path / "run", tied=True)
    step, tokenizer = tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "run" / "tokenizer.json"
    tokenizer.rename(tmp_path / "elsewhere.json")
    with pytest.raises(InputError, match=r"'tokenizer\.json'.* is gone: give one with --tokenizer"):
        export(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="is not a file"):
        export(step, tmp_path / "out", tokenizer=tmp_path / "absent")
    out = export(step, tmp_path / "out", tokenizer=tmp_path / "elsewhere.json")
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "elsewhere.json").read_bytes()


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "run", tied=True)
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(InputError, match="fp64"):
        export(step, tmp_path / "out", dtype="fp64")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="cannot be written"):
        export(step, tmp_path / "file")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(RunFailed, match="No space left"):
            export(step, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []
    file = step / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="damaged"):
        export(step, tmp_path / "out")
