"""A tokenizer trained once, and token shards that are memory-mapped; both cached under a hash of what made them."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.core.errors import InputError
from paceline.data.sources import documents, files

END = "<|end|>"
"""Follows every document; token 0 of the tokenizers that we train."""
_FORMAT = 2
_SAMPLE_BYTES = 6_000_000
"""A tokenizer learns from at most about so much text: more changes few merges and costs minutes."""
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Split:
    """Tokens of all documents, each followed by END, and the offset at which each document starts."""

    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True, slots=True)
class Corpus:
    """What `prepare` made.

    Attributes:
        tokenizer: path of its tokenizer.json.
        vocab_size: its entries.
        end: id of the token behind each document.
        fingerprint: hash of sources and settings; part of a run's identity.
    """

    tokenizer: Path
    vocab_size: int
    end: int
    fingerprint: str
    train: Split
    eval: Split | None

    def unigram_entropy(self) -> float:
        """Cross entropy, in nats a token, of the evaluation text under the token frequencies of the training text.

        What a model reaches that knows how frequent tokens are and nothing of their context.
        """
        counts = np.bincount(self.train.tokens, minlength=self.vocab_size) + 1.0
        logs = np.log(counts / counts.sum())
        text = self.eval.tokens if self.eval is not None else self.train.tokens
        return float(-logs[text].mean())


def prepare(
    train: Sequence[str], *, held_out: Sequence[str] | float | None, vocab_size: int, cache: Path,
    tokenizer_file: Path | None = None, text_key: str = "text",
) -> Corpus:  # fmt: skip
    """Reads, splits, tokenizes and caches; a second call with the same files and settings only opens the cache.

    Args:
        train: sources, see `sources.files`.
        held_out: sources of the evaluation text, a share of the training documents (chosen by hash), or None.
        vocab_size: of the tokenizer to train.
        tokenizer_file: a tokenizer.json to use instead.
        cache: folder for all corpora.

    Raises:
        InputError: a bad source, or too little text.
    """
    paths = files(train)
    eval_paths = files(held_out) if isinstance(held_out, Sequence) else []
    recipe = {
        "format": _FORMAT,
        "files": [[_stamp(p) for p in group] for group in (paths, eval_paths)],
        "share": held_out if isinstance(held_out, float) else None,
        "vocab_size": vocab_size,
        "tokenizer": _stamp(tokenizer_file) if tokenizer_file else None,
        "text_key": text_key,
    }
    fingerprint = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    folder = cache / fingerprint
    if not (folder / "index.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=cache))
        try:
            share = held_out if isinstance(held_out, float) else None
            texts = _split(documents(paths, text_key), share)
            held = list(documents(eval_paths, text_key)) if eval_paths else texts[1]
            _build(draft, texts[0], held, vocab_size, tokenizer_file)
            _commit(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return _open(folder, fingerprint)


def _stamp(path: Path) -> list[object]:
    if not path.is_file():
        raise InputError(f"file {path} does not exist (looked in {Path.cwd()}).")
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _commit(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder)
    except OSError:
        if not (folder / "index.json").exists():
            raise


def _split(texts: Iterable[str], share: float | None) -> tuple[list[str], list[str]]:
    """(training, held out). Documents go by hash: the same one is held out whatever stands beside it.

    Where that takes none, the one with the lowest hash is held out; of a single document, its end.
    """
    numbered = [(int.from_bytes(hashlib.blake2b(t.encode(), digest_size=8).digest(), "little"), t) for t in texts]
    if not numbered:
        raise InputError("the training sources hold no text: every file is empty. Name files with text in data.train.")
    if not share:
        return [text for _, text in numbered], []
    if len(numbered) == 1:
        text = numbered[0][1]
        cut = round(len(text) * (1 - share))
        return [text[:cut]], [text[cut:]]
    limit = max(share * 2**64, min(number for number, _ in numbered) + 1)
    train = [text for number, text in numbered if number >= limit]
    return train, [text for number, text in numbered if number < limit]


def _build(folder: Path, train: list[str], held: list[str], vocab_size: int, given: Path | None) -> None:
    tokenizer = _load(given) if given else _learn(train, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    if end is None:
        end = next(
            (i for t in ("</s>", "<|endoftext|>", "<|im_end|>") if (i := tokenizer.token_to_id(t)) is not None), None
        )
    if end is None:
        raise InputError(f"tokenizer {given} has no end-of-text token ({END}, </s>, <|endoftext|>): add one.")
    size = tokenizer.get_vocab_size()
    for name, texts in (("train", train), ("eval", held)):
        if texts:
            _write(folder, name, _encode(tokenizer, texts, end), np.uint16 if size <= 2**16 else np.uint32)
    (folder / "index.json").write_text(json.dumps({"vocab_size": size, "end": end, "eval": bool(held)}))


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for a malformed file
        raise InputError(f"tokenizer {path} cannot be read: {error}.") from None


def _learn(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    every = max(1, sum(map(len, texts)) // _SAMPLE_BYTES)
    tokenizer.train_from_iterator(texts[::every], trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, texts: list[str], end: int) -> Iterator[list[int]]:
    stream = iter(texts)
    while chunk := list(islice(stream, _AT_ONCE)):
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            yield [*encoding.ids, end]


def _write(folder: Path, name: str, rows: Iterable[list[int]], dtype: type) -> None:
    parts, starts, at = [], [], 0
    for row in rows:
        starts.append(at)
        parts.append(np.asarray(row, dtype=dtype))
        at += len(row)
    np.save(folder / f"{name}.tokens.npy", np.concatenate(parts))
    np.save(folder / f"{name}.starts.npy", np.asarray(starts, dtype=np.int64))


def _open(folder: Path, fingerprint: str) -> Corpus:
    index = json.loads((folder / "index.json").read_text())

    def split(name: str) -> Split:
        return Split(
            np.load(folder / f"{name}.tokens.npy", mmap_mode="r"), np.load(folder / f"{name}.starts.npy", mmap_mode="r")
        )

    return Corpus(
        folder / "tokenizer.json", index["vocab_size"], index["end"], fingerprint,
        split("train"), split("eval") if index["eval"] else None,
    )  # fmt: skip
