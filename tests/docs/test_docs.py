"""Code blocks of the docs run.

The language line of a block says what it is for:
  ```yaml file=NAME      the block is a file; later blocks of the page find it
  ```python file=NAME
  ```bash run            each line is a command; options: exit=N, prints="text", same="text" (the lines with it are equal)
Blocks of a page run in order, in one empty folder. Python blocks without `file` must at least compile.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  (its import is paid once, before the first timeout starts)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


@dataclass(frozen=True)
class Block:
    language: str
    options: dict[str, str]
    text: str


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    for language, rest, body in FENCE.findall(text):
        pairs = [word.partition("=") for word in shlex.split(rest)]
        found.append(Block(language, {key: value for key, _, value in pairs}, body))
    return found


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )


def run_bash(block: Block, folder: Path) -> None:
    output = ""
    for command in block.text.replace("\\\n", " ").splitlines():
        done = run_command(command, folder)
        expected = int(block.options.get("exit", "0"))
        assert done.returncode == expected, f"{command}\nexit {done.returncode}, not {expected}\n{done.stdout}"
        output += done.stdout
    if "prints" in block.options:
        assert block.options["prints"] in output
    if "same" in block.options:
        lines = [line for line in output.splitlines() if block.options["same"] in line]
        assert len(lines) > 1 and len(set(lines)) == 1, output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_the_page_run(name: str, tmp_path: Path) -> None:
    for block in blocks((ROOT / name).read_text()):
        if block.language == "python":
            compile(block.text, name, "exec")
        if "file" in block.options:
            (tmp_path / block.options["file"]).write_text(block.text)
        if block.language == "bash" and "run" in block.options:
            run_bash(block, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_links_of_the_page_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"


def test_a_failing_command_and_a_missing_print_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit 1, not 0"):
        run_bash(blocks("```bash run\nfalse\n```\n")[0], tmp_path)
    with pytest.raises(AssertionError):
        run_bash(blocks('```bash run prints="b"\necho a\n```\n')[0], tmp_path)
    with pytest.raises(AssertionError):
        run_bash(blocks('```bash run same="a"\necho a1\necho a2\n```\n')[0], tmp_path)


def test_every_page_is_in_the_navigation() -> None:
    shown = (ROOT / "mkdocs.yml").read_text()
    missing = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in missing if page not in shown] == []


def test_generated_pages_are_what_the_code_says() -> None:
    done = run_command(f"{shlex.quote(sys.executable)} {ROOT / 'tools' / 'reference.py'} --check", ROOT)
    assert done.returncode == 0, done.stdout
