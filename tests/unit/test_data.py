"""Sources, tokens, packing, order and loader."""

import json

import numpy as np
import pytest
import torch

from paceline.core.errors import InputError
from paceline.core.targets import IGNORE
from paceline.data import Loader, prepare
from paceline.data.order import rows_at
from paceline.data.packing import Rows
from paceline.data.sources import documents, files
from paceline.data.tokens import Split
from paceline.train.evaluate import evaluate


def texts(folder, count=40):
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(f"document {i} says hello to number {i * i} and to {'x' * (i % 7)}\n" * 3)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return prepare([texts(folder)], held_out=0.2, vocab_size=300, cache=tmp_path_factory.mktemp("cache"))


def loader(corpus, **changes):
    options = dict(sequence_length=16, micro_batch=2, global_sequences=8, seed=7, epochs=3)
    return Loader(corpus, **{**options, **changes})


def test_bad_sources_name_file_and_line(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.*does not exist"):
        files([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match="holds no file ending in"):
        files([str(tmp_path)])
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n\xff\xfe broken")
    with pytest.raises(InputError, match=r"bad\.txt:2 is not UTF-8"):
        list(documents([bad], "text"))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "one"}\n\n{"body": "two"}\n')
    with pytest.raises(InputError, match=r"lines\.jsonl:3 has no text under 'text' \(found: 'body'\)"):
        list(documents([lines], "text"))
    lines.write_text('{"text": "one"}\n{oops\n')
    with pytest.raises(InputError, match=r"lines\.jsonl:2 is not JSON"):
        list(documents([lines], "text"))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(InputError, match="hold no text"):
        prepare([str(empty)], held_out=None, vocab_size=300, cache=tmp_path / "cache")


def test_jsonl_and_text_make_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"t": "one"}\n{"t": "two"}\n')
    assert list(documents([tmp_path / "a.jsonl"], "t")) == ["one", "two"]


def test_stdlib_is_found_without_tests_and_packages():
    names = [str(p) for p in files(["stdlib"])]
    assert any(n.endswith("/json/decoder.py") for n in names)
    assert not any("site-packages" in n or "/test/" in n for n in names)
    assert names == sorted(names)


def test_the_cache_is_used_and_depends_on_its_inputs(tmp_path):
    source = texts(tmp_path)
    make = lambda size: prepare([source], held_out=0.2, vocab_size=size, cache=tmp_path / "cache")  # noqa: E731
    first = make(300)
    stamp = first.tokenizer.stat().st_mtime_ns
    assert make(300).tokenizer.stat().st_mtime_ns == stamp
    assert make(310).fingerprint != first.fingerprint
    (tmp_path / "00.txt").write_text("another text, longer than before " * 9)
    assert make(300).fingerprint != first.fingerprint


def test_one_document_holds_out_its_end(tmp_path):
    (tmp_path / "novel.txt").write_text("it was a dark and stormy night " * 100)
    one = prepare([str(tmp_path / "novel.txt")], held_out=0.1, vocab_size=280, cache=tmp_path / "cache")
    assert one.eval is not None
    assert 0 < len(one.eval.tokens) < len(one.train.tokens)


def test_packing_never_crosses_documents():
    split = Split(np.array([5, 6, 7, 0, 8, 9, 0, 3, 0], dtype=np.uint16), np.array([0, 4, 7]))
    rows = Rows.of(split, 4, packing=True)
    tokens, targets, segments = rows.take(np.arange(len(rows)))
    assert tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 3]]
    assert targets.tolist() == [[6, 7, 0, IGNORE], [9, 0, IGNORE, 0]]
    assert segments.tolist() == [[1, 1, 1, 1], [2, 2, 2, 3]]


def test_without_packing_a_row_is_one_document():
    split = Split(np.array([5, 6, 7, 0, 8, 9, 0, 3, 0], dtype=np.uint16), np.array([0, 4, 7]))
    tokens, targets, segments = Rows.of(split, 4, packing=False).take(np.arange(3))
    assert targets.tolist() == [[6, 7, 0, IGNORE], [9, 0, IGNORE, IGNORE], [0, IGNORE, IGNORE, IGNORE]]
    assert (segments >= -1).all()
    assert tokens[1].tolist() == [8, 9, 0, 0]


@pytest.mark.parametrize("packing", [True, False])
def test_I67_every_token_is_predicted_once(corpus, packing):
    feed = loader(corpus, packing=packing, micro_batch=3)
    counted = sum(int((feed.eval_batch(i).targets_BT != IGNORE).sum()) for i in range(feed.eval_batches()))
    assert counted == len(corpus.eval.tokens) - len(corpus.eval.starts)


def test_I64_order_is_blind_to_interruptions_and_world(corpus):
    """Leaves dealt over any world, from any step on, are the same rows in the same order."""
    feed = loader(corpus)
    whole = [feed.batch(s, i).tokens_BT for s in range(feed.steps) for i in range(feed.micro_batches(s))]
    again = loader(corpus)
    later = [
        again.batch(s, i).tokens_BT for s in range(feed.steps // 2, feed.steps) for i in range(again.micro_batches(s))
    ]
    assert all(torch.equal(a, b) for a, b in zip(whole[-len(later) :], later, strict=True))
    assert sum(len(b) for b in whole) == 3 * feed.epoch_rows
    count = feed.epoch_rows
    for epoch in (0, 1, 2):
        assert sorted(rows_at(7, epoch * count, (epoch + 1) * count, count).tolist()) == list(range(count))
    assert rows_at(7, 0, count, count).tolist() != rows_at(7, count, 2 * count, count).tolist()
    assert rows_at(7, 0, count, count).tolist() != rows_at(8, 0, count, count).tolist()


def test_I68_evaluation_is_the_token_mean(monkeypatch):
    """16 tokens at 2.0 and one at 6.0, cut into any batches: 2.235294."""
    import paceline

    mesh = paceline.init(environ={})
    engine = paceline.shard(torch.nn.Linear(1, 1), mesh)
    for cut in (1, 4, 17):
        losses = [2.0] * 16 + [6.0]
        batches = [losses[i : i + cut] for i in range(0, 17, cut)]
        record = evaluate(
            engine, len(batches), batches.__getitem__, lambda module, b: (torch.tensor(sum(b)), float(len(b)))
        )
        assert record.loss == pytest.approx(2.235294, abs=1e-6)
        assert record.tokens == 17


def test_unigram_entropy_is_that_of_the_counts(corpus):
    counts = np.bincount(corpus.train.tokens, minlength=corpus.vocab_size) + 1.0
    expected = float(np.mean([-np.log(counts[t] / counts.sum()) for t in corpus.eval.tokens]))
    assert corpus.unigram_entropy() == pytest.approx(expected)
    assert json.loads((corpus.tokenizer.parent / "index.json").read_text())["end"] == corpus.end
