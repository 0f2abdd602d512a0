"""House rules that no off-the-shelf linter knows. `python tools/house.py` prints each breach and exits 1 if there is one.

A rule is a function from a parsed file to breaches. Rules aim at what a reader would object to: where one objects to
code that is fine, the rule is refined, and its test gets the case.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
ROOT = Path(__file__).resolve().parent.parent
CODE = ("src", "tests", "tools", "examples", "benchmarks")
PROSE = ("docs", "changes", "README.md", "CONTRIBUTING.md", "recipes")
PACKAGE = "src/paceline/"

MUTATORS = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove reverse setdefault sort update".split()
)
MUTABLE_CALLS = frozenset("dict list set defaultdict OrderedDict Counter deque bytearray".split())
PICKLERS = frozenset("pickle cPickle _pickle cloudpickle dill joblib shelve marshal".split())
NO_NAMES = frozenset("utils util helpers helper misc common".split())


@dataclass(frozen=True, slots=True)
class File:
    """A Python file: its path from the root of the project, its text and its tree."""

    path: str
    text: str
    tree: ast.Module

    def within(self, *places: str) -> bool:
        """Whether it is one of `places`, given from the package: "mesh/" for a folder, "mesh/env.py" for a file."""
        inside = self.path.removeprefix(PACKAGE)
        return any(inside.startswith(place) if place.endswith("/") else inside == place for place in places)

    @property
    def ours(self) -> bool:
        return self.path.startswith(PACKAGE)


@dataclass(frozen=True, slots=True, order=True)
class Breach:
    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"


Rule = Callable[[File], Iterator[tuple[int, str]]]


def dotted(node: ast.AST) -> str:
    """`torch.distributed` of that expression; empty where it is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def file_size(file: File) -> Iterator[tuple[int, str]]:
    lines = file.text.count("\n")
    if lines >= FILE_LINES:
        yield 1, f"{lines} lines; a file has fewer than {FILE_LINES}: split it by noun"


def function_size(file: File) -> Iterator[tuple[int, str]]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines; a function has fewer than {FUNCTION_LINES}"


def collectives(file: File) -> Iterator[tuple[int, str]]:
    if not file.ours or file.within("mesh/"):
        return
    remedy = "only mesh/ uses torch.distributed: ask the mesh"
    for line, name in imports(file.tree):
        if name.startswith("torch.distributed"):
            yield line, f"imports {name}; {remedy}"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            yield node.lineno, f"uses torch.distributed; {remedy}"


def environment(file: File) -> Iterator[tuple[int, str]]:
    if not file.ours or file.within("mesh/env.py", "launch/"):
        return
    remedy = "only mesh/env.py and launch/ read the environment: take the value as an argument"
    reads = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    for line, name in imports(file.tree):
        if name in reads:
            yield line, f"imports {name}; {remedy}"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in reads:
            yield node.lineno, f"uses {dotted(node)}; {remedy}"


def printing(file: File) -> Iterator[tuple[int, str]]:
    if not file.ours or file.within("cli/", "track/console.py"):
        return
    for node, name in calls(file.tree):
        if name in {"print", "sys.stdout.write", "sys.stderr.write"}:
            yield node.lineno, f"calls {name}; only cli/ and track/console.py print: return a record"


def stage_compared(file: File) -> Iterator[tuple[int, str]]:
    """Comparisons with "auto" or None ask whether a stage was given, not which. plan/ counts bytes by stage, torch-free."""
    if not file.ours or file.within("zero/residency.py", "plan/"):
        return
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        asks = any(isinstance(s, ast.Constant) and (s.value is None or isinstance(s.value, str)) for s in sides)
        if not asks and any(dotted(side).rpartition(".")[2] == "stage" for side in sides):
            yield node.lineno, "compares a stage; only zero/residency.py does: give the table's row a property"


def hooks(file: File) -> Iterator[tuple[int, str]]:
    if not file.ours or file.within("zero/hooks.py"):
        return
    for node, _ in calls(file.tree):
        if isinstance(node.func, ast.Attribute) and re.fullmatch(r"register_(\w+_)?hook", node.func.attr):
            yield node.lineno, f"calls {node.func.attr}; only zero/hooks.py registers hooks"


def module_names(file: File) -> Iterator[tuple[int, str]]:
    for part in Path(file.path).with_suffix("").parts:
        if part in NO_NAMES:
            yield 1, f"there is no `{part}`: a helper lives with its noun"


def pickles(file: File) -> Iterator[tuple[int, str]]:
    if not file.within("checkpoint/"):
        return
    for line, name in imports(file.tree):
        if name.partition(".")[0] in PICKLERS:
            yield line, f"imports {name}; a checkpoint is tensors and JSON only"
    for node, name in calls(file.tree):
        if name in {"torch.load", "torch.save"}:
            yield node.lineno, f"calls {name}, which pickles; a checkpoint is tensors and JSON only"


def module_state(file: File) -> Iterator[tuple[int, str]]:
    """A constant table is fine; one that the module itself changes, or a `global`, is state."""
    if not file.ours:
        return
    names = {name for statement in file.tree.body for name in _mutable_names(statement)}
    local = {arg.arg for node in ast.walk(file.tree) if isinstance(node, ast.arguments) for arg in _arguments(node)}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"`global {', '.join(node.names)}`: state belongs to an object"
        name = _changed(node)
        if name in names - local:
            yield node.lineno, f"changes the module's {name}: state belongs to an object"


def _arguments(node: ast.arguments) -> list[ast.arg]:
    rest = [arg for arg in (node.vararg, node.kwarg) if arg is not None]
    return [*node.posonlyargs, *node.args, *node.kwonlyargs, *rest]


def _mutable_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return
    literal = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
    made = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    if literal or made:
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _changed(node: ast.AST) -> str:
    """The name that this node changes in place: `x[k] = v`, `del x[k]`, `x.append(v)`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return dotted(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return dotted(node.func.value)
    return ""


RULES: dict[str, Rule] = {
    "file size": file_size,
    "function size": function_size,
    "collectives": collectives,
    "environment": environment,
    "printing": printing,
    "stage": stage_compared,
    "hooks": hooks,
    "names": module_names,
    "pickle": pickles,
    "module state": module_state,
}

# What must not reach a reader: paths of somebody's machine, and notes to self.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:root|home|work|opt|mnt)/\w")
NOTE_TO_SELF = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def check_code(path: str, text: str) -> list[Breach]:
    """Breaches of a Python file that lies at `path` from the root of the project."""
    file = File(path, text, ast.parse(text, path))
    return [Breach(path, line, name, what) for name, rule in RULES.items() for line, what in rule(file)]


def check_prose(path: str, text: str) -> list[Breach]:
    """Breaches of a page: what belongs to the writer's desk, not to the reader."""
    found: list[Breach] = []
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            found.append(Breach(path, number, "prose", "names a path of one machine"))
        if NOTE_TO_SELF.search(line):
            found.append(Breach(path, number, "prose", "a note to self: do it, or file it"))
    return found


def check(root: Path) -> list[Breach]:
    found: list[Breach] = []
    for folder in CODE:
        for file in sorted((root / folder).rglob("*.py")):
            found += check_code(file.relative_to(root).as_posix(), file.read_text())
    for place in PROSE:
        top = root / place
        pages = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.suffix in {".md", ".yaml", ".yml"})
        for page in pages:
            found += check_prose(page.relative_to(root).as_posix(), page.read_text())
    return sorted(found)


def main() -> int:
    found = check(ROOT)
    for breach in found:
        print(breach)
    print(f"house rules: {len(found)} breaches" if found else f"house rules: {len(RULES) + 1} kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
