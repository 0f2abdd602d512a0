"""The command as a program: exit codes, one paragraph for an error, and no torch where none is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main as cli
from paceline.core.errors import DoesNotFit, InputError, Interrupted, PacelineError, RunFailed

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "recipes" / "demo.yaml")

WITHOUT_TORCH = """
import runpy, sys
sys.argv[0] = "paceline"
try:
    runpy.run_module("paceline", run_name="__main__")
except SystemExit as end:
    code = end.code
heavy = sorted({"torch", "numpy", "transformers", "tokenizers"} & set(sys.modules))
assert not heavy, heavy
sys.exit(code)
"""


def paceline(*arguments: str, program: tuple[str, ...] = ("-m", "paceline")) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, timeout=60, check=False, env=os.environ
    )


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("check", DEMO), *((verb, "--help") for verb in cli.build_parser()[1])]
)
def test_help_and_check_never_load_torch(arguments: tuple[str, ...]) -> None:
    done = paceline(*arguments, program=("-c", WITHOUT_TORCH))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_i83_check_prints_each_value_with_its_origin() -> None:
    done = paceline("check", DEMO, "optim.lr=1e-3", "--procs", "2", "optim.clip=none", "parallel.stage=auto")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert re.search(r" 0\.001 +override 'optim\.lr=1e-3'$", lines["optim.lr"])
    assert re.search(r" none +override 'optim\.clip=none'$", lines["optim.clip"])
    assert re.search(r" decoder +.*demo\.yaml:[0-9]+$", lines["model.kind"])
    assert re.search(r" 0 +default$", lines["model.dropout"])
    assert re.search(r" 0 +auto: the lowest stage that fits", lines["parallel.stage"])
    assert re.search(r" [0-9]+ +auto: the largest divisor", lines["parallel.micro_batch"])
    assert re.search(r" (bf16|fp32) +auto: bf16 is (not )?quick here", lines["precision"])
    assert lines["run.procs"].endswith("--procs 2")
    assert "Parameters:" in lines


def test_check_of_a_model_of_unknown_size_says_what_is_open() -> None:
    done = paceline("check", DEMO, "model={kind: target, target: 'm:f'}", "parallel.stage=auto")
    assert done.returncode == 0, done.stderr
    assert re.search(r"parallel\.stage +auto +resolved when the model is built", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "no.yaml"), "paceline: There is no recipe file no.yaml"),
        (("check", DEMO, "optim.lrr=1"), "did you mean 'lr'?"),
        (("check", DEMO, "parallel.micro_batch=7"), "7 does not divide the"),
        (("check", DEMO, "--procs", "0"), "at least 1 is needed"),
        (("check", DEMO, "--prosc", "2"), "did you mean --procs?"),
        (("check", DEMO, "nonsense"), "an override is written key=value"),
        (("check",), "required: recipe"),
        (("chekc", DEMO), "invalid choice: 'chekc'"),
    ],
)
def test_wrong_input_is_one_paragraph_and_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = paceline(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_model_that_does_not_fit_is_code_3() -> None:
    done = paceline("check", DEMO, "model.dim=65536", "model.layers=200", "model.heads=512", "model.kv_heads=512")
    assert done.returncode == 3
    assert "The model does not fit" in done.stderr


@pytest.mark.parametrize("arguments", [("--trace", "check", "no.yaml"), ("check", "no.yaml", "--trace")])
def test_trace_shows_the_traceback_and_keeps_the_code(arguments: tuple[str, ...]) -> None:
    done = paceline(*arguments)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "paceline: There is no recipe file" in done.stderr


def test_without_a_verb_it_shows_the_help() -> None:
    done = paceline()
    assert done.returncode == 2
    assert "check a recipe" in done.stdout


def test_a_closed_pipe_is_quiet() -> None:
    command = f"'{sys.executable}' -m paceline check '{DEMO}' | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() in ("141", "0")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RunFailed("it broke"), 1, "paceline: it broke"),
        (InputError("it is wrong"), 2, "paceline: it is wrong"),
        (DoesNotFit("too big"), 3, "paceline: too big"),
        (Interrupted("saved"), 75, "paceline: saved"),
        (PacelineError("some"), 1, "paceline: some"),
        (KeyboardInterrupt(), 130, "paceline: Stopped by Ctrl-C."),
        (MemoryError(), 3, "The memory of this machine ran out"),
        (OSError(28, "No space left on device", "runs/x"), 1, "The system refused: No space left on device: runs/x."),
        (ZeroDivisionError("division by zero"), 1, "Paceline broke: ZeroDivisionError: division by zero."),
    ],
)
def test_each_error_has_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("paceline.cli.check.run", fail)
    assert cli.main(["check", "x.yaml"]) == code
    shown = capsys.readouterr().err
    assert says in shown
    assert len(shown.strip().splitlines()) == 1


def test_overrides_may_stand_before_and_after_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("paceline.cli.check.run", lambda args: seen.append(args.overrides) or 0)
    assert cli.main(["check", "r.yaml", "a.b=1", "--procs", "2", "c.d=2", "e=x=y"]) == 0
    assert seen == [["a.b=1", "c.d=2", "e=x=y"]]
