"""From a checkpoint to files that transformers loads."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import manifest
from paceline.checkpoint.reader import Reader
from paceline.checkpoint.store import StrPath, verify, write_synced
from paceline.core.errors import InputError, RunFailed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What `dtype` replaces. Buffers, integers and 8-bit weights mean something in their own dtype only.
_CONVERTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def export(checkpoint: StrPath, out: StrPath, *, dtype: str = "fp32", tokenizer: StrPath | None = None) -> Path:
    """Writes model.safetensors, and for a model known to transformers config and tokenizer, to `out`.

    One process, no engine; memory for one tensor at a time.

    Args:
        checkpoint: one checkpoint folder.
        dtype: "fp32" or "bf16", of the weights; buffers keep their own.
        tokenizer: a tokenizer.json; default: the one that the run recorded or that lies in its folder.

    Raises:
        InputError: a damaged checkpoint, an unknown dtype, a tokenizer that is not there.
        RunFailed: `out` cannot be written.
    """
    if dtype not in DTYPES:
        raise InputError(f"export dtype {dtype!r}: choose one of {', '.join(DTYPES)}.")
    checkpoint, out = Path(checkpoint), Path(out)
    verify(checkpoint)
    reader = Reader(checkpoint)
    config: dict[str, Any] = (reader.manifest.extra.get("model") or {}).get("hf") or {}
    source = _tokenizer(reader, tokenizer, needed=bool(config))
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_weights(
            reader, out / "model.safetensors", DTYPES[dtype], with_ties=not config.get("tie_word_embeddings")
        )
        if config:
            _write_json(out / "config.json", {**config, "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")})
            ends = {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
            _write_json(out / "generation_config.json", ends)
        if source is not None:
            if source.resolve() != (out / "tokenizer.json").resolve():
                shutil.copyfile(source, out / "tokenizer.json")
            _write_json(out / "tokenizer_config.json", _tokenizer_config(source, config))
    except OSError as error:
        raise RunFailed(f"{error.filename or out} cannot be written: {error.strerror or error}.") from None
    return out


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_synced(path, json.dumps(value, indent=2).encode() + b"\n")


def _tokenizer(reader: Reader, given: StrPath | None, *, needed: bool) -> Path | None:
    """The tokenizer.json to copy: the one given, else the one recorded, else one beside the checkpoints."""
    if given is not None:
        if not Path(given).is_file():
            raise InputError(f"tokenizer {given} is not a file: name a tokenizer.json.")
        return Path(given)
    recorded = reader.manifest.extra.get("tokenizer")
    if not needed and not recorded:
        return None
    root = reader.folder.resolve().parent
    for folder in (reader.folder, root, root.parent):
        if (found := folder / str(recorded or "tokenizer.json")).is_file():
            return found
    if recorded:
        raise InputError(f"the tokenizer {recorded!r} that {reader.folder} names is gone: give one with --tokenizer.")
    return None


def _tokenizer_config(tokenizer: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The settings without which transformers does not know the end token of a bare tokenizer.json."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    try:
        added = {token["id"]: token["content"] for token in json.loads(tokenizer.read_bytes())["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"tokenizer {tokenizer} is not a tokenizer.json of the tokenizers library ({error!r})."
        ) from None
    ends = {f"{end}_token": added.get(config.get(f"{end}_token_id")) for end in ("bos", "eos", "pad")}
    return about | {name: token for name, token in ends.items() if token is not None}


def _write_weights(reader: Reader, path: Path, dtype: torch.dtype, *, with_ties: bool) -> None:
    """One tensor after the other. transformers ties embeddings again by its config; others get a copy for each name."""
    sources = {name: (kind, name) for kind, name in reader.tensors if kind in ("master", "param", "buffer")}
    if with_ties:
        sources |= {alias: sources[name] for alias, name in reader.manifest.scalars["ties"].items()}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, key in sources.items():
        entry = reader.tensors[key][0]
        converted = key[0] != "buffer" and entry.torch_dtype in _CONVERTED
        kinds[name] = (dtype if converted else entry.torch_dtype, entry.shape)
    head, _ = manifest.safetensors_header(kinds, {"format": "pt"})
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(head)
            for name, key in sources.items():
                tensor = reader.whole(*key).to(kinds[name][0]).contiguous().view(-1)
                file.write(memoryview(tensor.view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
