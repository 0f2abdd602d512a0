"""From a checkpoint to files that transformers loads."""

import json
import shutil
from pathlib import Path

import torch

from paceline.checkpoint import manifest
from paceline.checkpoint.reader import Reader
from paceline.checkpoint.store import verify, write_synced
from paceline.core.errors import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(checkpoint: Path, out: Path, *, dtype: str = "fp32", tokenizer: Path | None = None) -> Path:
    """Writes model.safetensors, and for a decoder config.json and the tokenizer, to `out`. One process, no engine.

    Args:
        checkpoint: one checkpoint folder.
        dtype: "fp32" or "bf16", of trained floating-point weights.
        tokenizer: a tokenizer.json; default: the one that the run recorded.

    Raises:
        InputError: a damaged checkpoint or unknown dtype.
    """
    if dtype not in DTYPES:
        raise InputError(f"export dtype {dtype!r}: choose one of {', '.join(DTYPES)}.")
    verify(checkpoint)
    reader = Reader(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    config = (reader.manifest.extra.get("model") or {}).get("hf")
    _write_weights(reader, out / "model.safetensors", DTYPES[dtype], with_ties=not config)
    if config:
        config = {**config, "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}
        write_synced(out / "config.json", json.dumps(config, indent=2).encode())
        ends = {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
        write_synced(out / "generation_config.json", json.dumps(ends).encode())
    source = tokenizer or _recorded_tokenizer(reader, checkpoint)
    if source is not None:
        shutil.copyfile(source, out / "tokenizer.json")
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "clean_up_tokenization_spaces": False,
        }
        write_synced(out / "tokenizer_config.json", json.dumps(about, indent=2).encode())
    return out


def _recorded_tokenizer(reader: Reader, checkpoint: Path) -> Path | None:
    name = reader.manifest.extra.get("tokenizer")
    if not name:
        return None
    for folder in (checkpoint, checkpoint.parent, checkpoint.parent.parent, Path()):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"the tokenizer {name!r} that {checkpoint} names is gone: give one with --tokenizer.")


def _write_weights(reader: Reader, path: Path, dtype: torch.dtype, *, with_ties: bool) -> None:
    """One tensor after the other, so that memory stays at one tensor. transformers ties again by config, others get both."""
    sources = {name: (kind, name) for kind, name in reader.names("master", "param", "buffer")}
    if with_ties:
        sources |= {alias: sources[name] for alias, name in reader.manifest.scalars["ties"].items()}
    dtypes, shapes = {}, {}
    tensors = reader.manifest.by_tensor()
    for name, key in sources.items():
        entry = tensors[key][0]
        trained = key[0] == "master" and entry.torch_dtype == torch.float32
        dtypes[name], shapes[name] = dtype if trained else entry.torch_dtype, entry.shape
    head, _ = manifest.safetensors_header({n: (dtypes[n], shapes[n]) for n in sources}, {"format": "pt"})
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(head)
        for name, key in sources.items():
            tensor = reader.whole(*key).to(dtypes[name]).contiguous().view(-1)
            file.write(memoryview(tensor.view(torch.uint8).numpy()))
    draft.replace(path)
