"""`paceline train` as a program: ranks, interruptions, other launchers, bad input."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.track.jsonl import losses

PACELINE = [sys.executable, "-m", "paceline"]
STEPS = 10


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "texts").mkdir()
    for i in range(60):
        (folder / "texts" / f"{i}.txt").write_text(f"item {i}: {i * i} is the square of {i}, says the table.\n" * 4)
    (folder / "tiny.yaml").write_text(
        "model: {kind: decoder, dim: 32, layers: 2, heads: 2, dropout: 0.1}\n"
        "data: {train: texts, eval: 10%, sequence_length: 32, tokenizer: {vocab_size: 300}, cache: cache}\n"
        "optim: {lr: 1e-3, global_batch: 12seq}\n"
        "parallel: {stage: 3, micro_batch: 1}\n"
        f"run: {{steps: {STEPS}, dir: runs/x, save_every: 2steps, eval_every: 5steps, procs: 2}}\n"
    )
    return folder


def environment():
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "OMP_NUM_THREADS": "1"
    }


def start(home, *arguments):
    return subprocess.Popen(
        [*PACELINE, *arguments], cwd=home, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def paceline(home, *arguments, code=0):
    process = start(home, *arguments)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, (process.returncode, out[-2000:], err[-2000:])
    assert "Traceback" not in err
    return out, err


def curves(home, run):
    log = home / "runs" / run / "log.jsonl"
    return losses(log), losses(log, "eval")


@pytest.fixture(scope="module")
def whole(home):
    """The uninterrupted run that the others must equal, and what it printed."""
    out, _ = paceline(home, "train", "tiny.yaml", "run.dir=runs/whole")
    return curves(home, "whole"), out


def wait_for_step(home, run, step, process):
    log = home / "runs" / run / "log.jsonl"
    end = time.monotonic() + 60
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_says_what_it_does_and_leaves_its_folder(home, whole):
    _, out = whole
    for part in (
        "parallel.stage",
        "unigram entropy",
        "ZeRO stage 3",
        f"step {STEPS}/{STEPS}  loss",
        "evaluation loss",
        "saved",
        "tok/s",
    ):
        assert part in out, part
    found = {p.name for p in (home / "runs/whole").iterdir()}
    assert {"checkpoints", "log.jsonl", "plan.json", "recipe.json", "tokenizer.json", "loss.png", "logs"} <= found
    assert sorted(p.name for p in (home / "runs/whole/checkpoints").iterdir()) == ["step-00000008", "step-00000010"]


@pytest.mark.parametrize(("procs", "stage"), [(1, 0), (3, 1)])
def test_any_world_and_stage_gives_the_same_losses(home, whole, procs, stage):
    paceline(home, "train", "tiny.yaml", f"run.dir=runs/w{procs}", "--procs", str(procs), f"parallel.stage={stage}")
    assert curves(home, f"w{procs}") == whole[0]


def test_sigterm_saves_with_75_and_another_world_goes_on(home, whole):
    process = start(home, "train", "tiny.yaml", "run.dir=runs/term")
    wait_for_step(home, "term", 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "saved its state after step" in err
    out, _ = paceline(home, "train", "tiny.yaml", "run.dir=runs/term", "--procs", "3", "parallel.stage=2")
    assert "Going on after step" in out
    assert curves(home, "term") == whole[0]
    out, _ = paceline(home, "train", "tiny.yaml", "run.dir=runs/term")
    assert "The run is complete" in out


def children(pid):
    return [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


def test_a_killed_rank_ends_the_run_and_nothing_is_lost(home, whole):
    process = start(home, "train", "tiny.yaml", "run.dir=runs/killed")
    wait_for_step(home, "killed", 5, process)
    victim = next(p for p in children(process.pid) if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    before = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - before < 10
    assert process.returncode == 1
    assert "rank 1" in err.lower()
    assert "SIGKILL" in err
    paceline(home, "train", "tiny.yaml", "run.dir=runs/killed")
    assert curves(home, "killed") == whole[0]


def torchrun(home, run, *options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "paceline",
        "train",
        "tiny.yaml",
        f"run.dir=runs/{run}",
    ]
    return subprocess.Popen(
        command, cwd=home, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_under_torchrun_it_is_one_rank(home, whole):
    process = torchrun(home, "torchrun", "--standalone", "--nproc-per-node=2")
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out[-2000:]
    assert curves(home, "torchrun") == whole[0]


def test_two_torchrun_agents(home, whole):
    port = free_port()
    options = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}")
    agents = [torchrun(home, "agents", *options, f"--node-rank={n}") for n in (0, 1)]
    outs = [agent.communicate(timeout=100)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outs
    assert curves(home, "agents") == whole[0]


def test_export_is_what_transformers_loads(home, whole):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from paceline.checkpoint.manifest import Manifest
    from paceline.models import Decoder, DecoderConfig

    out, _ = paceline(home, "ckpt", "export", "runs/whole", "exported")
    assert "model.safetensors" in out
    extra = Manifest.read(home / "runs/whole/checkpoints/step-00000010").extra
    ours = Decoder(DecoderConfig(**extra["model"]["config"])).eval()
    ours.load_state_dict(load_file(home / "exported/model.safetensors"), strict=True)
    theirs = AutoModelForCausalLM.from_pretrained(home / "exported")
    tokens = torch.randint(0, 300, (2, 32))
    assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-5


def test_ckpt_lists_shows_and_verifies(home, whole):
    assert paceline(home, "ckpt", "ls", "runs/whole")[0].count("step-") == 2
    assert "exp_avg_sq" in paceline(home, "ckpt", "show", "runs/whole")[0]
    assert "is sound" in paceline(home, "ckpt", "verify", "runs/whole")[0]
    assert "no complete checkpoint" in paceline(home, "ckpt", "ls", "texts", code=2)[1]


BAD = {
    "optim.lrr=1": "did you mean",
    "data.train=nowhere": "'nowhere' does not exist",
    "model.heads=3": "do not divide",
    "parallel.stage=7": "stage",
    "data.eval=missing.txt": "'missing.txt' does not exist",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_paragraph_and_exit_code_2(home, override):
    _, err = paceline(home, "train", "tiny.yaml", "run.dir=runs/bad", override, "--procs", "1", code=2)
    assert BAD[override] in err.lower() or BAD[override] in err, err
    assert len([line for line in err.splitlines() if line.startswith("paceline:")]) <= 2


def test_a_run_keeps_its_identity(home, whole):
    _, err = paceline(home, "train", "tiny.yaml", "run.dir=runs/whole", "run.seed=4", code=2)
    assert "run.seed is 4" in err
    assert "started with 0" in err


def test_a_damaged_checkpoint_is_passed_over_with_a_word(home, whole):
    paceline(home, "train", "tiny.yaml", "run.dir=runs/hurt", "run.keep=5")
    victim = sorted((home / "runs/hurt/checkpoints/step-00000010").glob("*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-9] ^= 4
    victim.write_bytes(data)
    assert "damaged" in paceline(home, "ckpt", "verify", "runs/hurt/checkpoints/step-00000010", code=2)[1]
    out, _ = paceline(home, "train", "tiny.yaml", "run.dir=runs/hurt")
    assert re.search(r"Going on after step 8", out)
    assert curves(home, "hurt") == whole[0]


def test_a_busy_port_is_one_line(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, err = paceline(home, "train", "tiny.yaml", "run.dir=runs/port", "--port", str(port), code=2)
    assert str(port) in err


def test_a_users_own_module_trains(home):
    (home / "mine.py").write_text(
        "import torch\n"
        "class Bigram(torch.nn.Module):\n"
        "    def __init__(self, vocab):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(vocab, vocab)\n"
        "    def forward(self, tokens, targets):\n"
        "        return torch.nn.functional.cross_entropy(self.table(tokens).float().flatten(0, 1), targets.flatten())\n"
        "def build(vocab):\n"
        "    return Bigram(vocab)\n"
    )
    recipe = (home / "tiny.yaml").read_text().splitlines()
    recipe[0] = "model: {kind: target, target: 'mine.py:build', arguments: {vocab: 300}}"
    (home / "mine.yaml").write_text("\n".join(recipe))
    paceline(home, "train", "mine.yaml", "run.dir=runs/mine", "optim.lr=0.1")
    steps, evals = curves(home, "mine")
    assert steps[STEPS] < steps[1] - 0.2
    assert len(evals) == 2


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_I55_a_save_that_one_rank_enters_says_who_is_missing(tmp_path):
    code = (
        "import time, torch, paceline; from paceline.core.errors import PacelineError\n"
        "torch.manual_seed(0); mesh = paceline.init(); mesh.patience = 1.5\n"
        "engine = paceline.shard(torch.nn.Linear(2, 2), mesh, stage=2)\n"
        "if mesh.rank: time.sleep(30)\n"
        "try: paceline.save('saved', engine)\n"
        "except PacelineError as error: print(error, flush=True); import os; os._exit(error.exit_code)\n"
    )
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-c", code]
    pair = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment() | ranks | {"RANK": r}, stdout=subprocess.PIPE, text=True
        )
        for r in ("0", "1")
    ]
    try:
        out, _ = pair[0].communicate(timeout=25)
    finally:
        pair[1].kill()
        pair[1].communicate()
    assert pair[0].returncode == 1
    assert "rank 0 waited 1.5 s at saving a checkpoint" in out
    assert "anks 1 " in out
    assert not (tmp_path / "saved").exists()


def test_fewer_ranks_than_asked_is_said(home):
    code = (
        "import datetime, paceline; from paceline.core.errors import PacelineError\n"
        "try: paceline.init(timeout=datetime.timedelta(seconds=2))\n"
        "except PacelineError as error: print(error); raise SystemExit(error.exit_code)\n"
    )
    port = free_port()
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment() | ranks, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr[-800:]
    assert "rank 0 of 2 could not meet the others" in done.stdout


def test_the_demo_ends_with_equal_losses_and_can_be_run_again(home):
    tiny = [
        "data.train=texts",
        "data.eval=10%",
        "data.cache=cache",
        "data.sequence_length=32",
        "data.tokenizer.vocab_size=300",
    ]
    tiny += ["model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "run.steps=8"]
    for _ in range(2):
        out, _ = paceline(home, "demo", "--dir", "runs/demo", *tiny, "run.eval_every=4steps", "optim.global_batch=8seq")
        assert "all losses are equal, bit for bit" in out
        assert "unigram entropy" in out
        assert "A sample after 'def '" in out
        assert (home / "runs/demo/demo/loss.png").stat().st_size > 5000
