"""Each house rule fires on a breach, and leaves what only looks like one alone."""

import importlib.util
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2] / "tools" / "house.py"


def _load():
    spec = importlib.util.spec_from_file_location("house", HOUSE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


house = _load()
LONG_FUNCTION = "def f():\n" + "    pass\n" * 59

BREACHES = [
    ("file size", "zero/x.py", "x = 1\n" * 400),
    ("function size", "zero/x.py", LONG_FUNCTION),
    ("function size", "zero/x.py", "class A:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines())),
    ("collectives", "zero/x.py", "import torch.distributed as dist\n"),
    ("collectives", "train/x.py", "from torch.distributed import all_reduce\n"),
    ("collectives", "train/x.py", "from torch import distributed\n"),
    ("collectives", "train/x.py", "import torch\ntorch.distributed.barrier()\n"),
    ("environment", "data/x.py", "import os\nos.environ['A']\n"),
    ("environment", "mesh/mesh.py", "import os\nos.getenv('A')\n"),
    ("environment", "cli/x.py", "from os import environ\n"),
    ("printing", "zero/x.py", "print(1)\n"),
    ("printing", "track/jsonl.py", "import sys\nsys.stderr.write('')\n"),
    ("stage", "zero/engine.py", "if self.stage >= 2: pass\n"),
    ("stage", "train/x.py", "y = 3 == stage\n"),
    ("stage", "train/x.py", "y = stage in (1, 2)\n"),
    ("hooks", "models/x.py", "m.register_forward_pre_hook(f)\n"),
    ("hooks", "zero/unit.py", "t.register_hook(f)\n"),
    ("names", "zero/utils.py", ""),
    ("names", "utils/x.py", ""),
    ("pickle", "checkpoint/x.py", "import pickle\n"),
    ("pickle", "checkpoint/x.py", "import torch\ntorch.load('x')\n"),
    ("module state", "core/x.py", "SEEN = {}\ndef f(): SEEN['a'] = 1\n"),
    ("module state", "core/x.py", "seen: list[int] = []\ndef f(): seen.append(1)\n"),
    ("module state", "core/x.py", "from collections import defaultdict\nd = defaultdict(int)\ndef f(): d['a'] += 1\n"),
    ("module state", "core/x.py", "n = 0\ndef f():\n    global n\n    n = 1\n"),
]

FINE = [
    ("zero/x.py", "x = 1\n" * 399),
    ("zero/x.py", "def f():\n" + "    pass\n" * 58),
    ("mesh/x.py", "import torch.distributed as dist\n"),
    ("mesh/env.py", "import os\nos.environ\n"),
    ("launch/x.py", "import os\nos.environ\n"),
    ("cli/x.py", "print(1)\n"),
    ("track/console.py", "print(1)\n"),
    ("zero/residency.py", "y = stage >= 2\n"),
    ("plan/states.py", "y = stage >= 2\n"),
    ("zero/shard.py", "y = stage == 'auto'\nz = stage is None\n"),
    ("zero/hooks.py", "m.register_forward_hook(f)\n"),
    ("zero/guard.py", "SAFE = {T.register_hook}\n"),
    ("launch/x.py", "import pickle\n"),
    ("core/x.py", "TABLE = {'a': 1}\ndef f(): return TABLE['a']\n"),
    ("core/x.py", "names = ['a']\ndef f(names): names.append('b')\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES)
def test_a_breach_is_found(rule: str, path: str, text: str) -> None:
    found = house.check_code(f"src/paceline/{path}", text)
    assert [breach.rule for breach in found] == [rule]
    assert str(found[0]).startswith(f"src/paceline/{path}:")


@pytest.mark.parametrize(("path", "text"), FINE)
def test_what_is_fine_passes(path: str, text: str) -> None:
    assert house.check_code(f"src/paceline/{path}", text) == []


def test_every_rule_has_a_breach_here() -> None:
    assert {rule for rule, _, _ in BREACHES} == set(house.RULES)


def test_the_package_rules_leave_tests_and_tools_alone() -> None:
    assert house.check_code("tests/x.py", "import os\nimport torch.distributed\nprint(os.environ)\n") == []


@pytest.mark.parametrize("line", ["see /" + "home/me/runs", "TO" + "DO: say more"])
def test_prose_with_a_machine_path_or_a_note_to_self_is_found(line: str) -> None:
    assert len(house.check_prose("docs/x.md", f"good\n{line}\n")) == 1


def test_prose_with_relative_paths_passes() -> None:
    assert house.check_prose("docs/x.md", "runs/home/x and https://example.com/work/a and /tmp/x\n") == []


def test_the_program_lists_breaches_and_fails(tmp_path: Path, monkeypatch, capsys) -> None:
    bad = tmp_path / "src" / "paceline" / "zero" / "x.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("print(1)\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.main() == 1
    assert "src/paceline/zero/x.py:1: printing" in capsys.readouterr().out
    bad.write_text("x = 1\n")
    assert house.main() == 0
