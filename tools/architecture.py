"""Check the rules of docs/architecture.md that a parser can check: import direction, late imports, state, pickle, environment.

    python tools/architecture.py

Exits 1 when a rule is broken. Every rule is a function from one :class:`Module` to lines of ``file:line: what``;
tests/test_architecture.py shows that each of them catches a planted violation.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# room -> rooms it may import beside itself; a room named here stands for all rooms below it
ROOMS = {
    "base": "",
    "wire": "base",
    "policy": "",
    "policy/cache": "base wire",
    "policy/sched": "base wire policy/cache",
    "policy/route": "base wire",
    "policy/heal": "base wire",
    "policy/scale": "base wire",
    "policy/think": "base wire",
    "text": "base wire",
    "sim": "base wire policy",
    "ops": "base",
    "quant": "base ops",
    "parallel": "base",
    "nn": "base ops quant parallel",
    "models": "base nn quant",
    "load": "base quant parallel",
    "engine": "base wire policy ops quant parallel nn models load",
    "kv": "base wire",
    "cluster": "base wire policy text kv",
    "cluster/worker": "base wire policy text kv cluster engine",
    "llm": "base wire load engine text",
    "train": "base wire llm policy/think",
    "native": "base ops",
    "web": "base wire",
    "cli": "base wire policy text sim ops quant parallel nn models load engine kv cluster llm train web native",
}
# rooms that only decide: no torch, no sockets, no clock, no event loop
DECIDE = ("policy", "text", "wire", "sim")
DECIDE_BANNED = {"torch", "asyncio", "time", "socket", "zmq", "threading", "subprocess"}
# where an import may stand inside a function: the command line, and the loaders that pick one file out of many
LATE = ("cli/", "models/registry.py", "ops/kernels.py", "cluster/worker/__main__.py")
PICKLE_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PICKLE_CALLS = {"torch.load", "torch.save"}
PICKLE_METHODS = {"send_pyobj", "recv_pyobj"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
CONTAINERS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
    "WeakValueDictionary",
}
MUTATORS = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "remove",
    "discard",
    "clear",
}
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:home|root|Users|opt|mnt|srv|work|tmp)/[\w.]")


@dataclass(frozen=True)
class Module:
    """One source file. ``name`` is its path below src/kilat, with ``/``."""

    name: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.name)

    @property
    def room(self) -> str:
        return room_of(self.name.removesuffix(".py"))


def room_of(path: str) -> str:
    """The most exact room that holds ``path`` (``policy/sched/plan``), or an empty string."""
    parts = path.split("/")
    prefixes = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((p for p in prefixes if p in ROOMS), "")


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in the file; ``from a import b`` gives ``a.b``."""
    package = ["kilat", *module.name.split("/")[:-1]]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def import_direction(module: Module) -> Iterator[str]:
    """Rooms import only the rooms that the table names; base imports nothing but the standard library."""
    room = module.room
    if not room:
        if module.name != "__init__.py":
            yield f"{module.name}:1: is in no room of the table"
        return
    allowed = [room, *ROOMS[room].split()]
    for line, target in imports(module):
        top, *rest = target.split(".")
        if top in ("bench", "tests", "tools"):
            yield f"{module.name}:{line}: imports {target}, which is not part of the package"
        elif room == "base" and top not in sys.stdlib_module_names and top != "kilat":
            yield f"{module.name}:{line}: base imports {target}, allowed: the standard library"
        elif top == "kilat" and (other := room_of("/".join(rest))) and not _covers(allowed, other, room):
            yield f"{module.name}:{line}: {room} imports {other}, allowed: {ROOMS[room] or 'nothing'}"


def _covers(allowed: list[str], other: str, room: str) -> bool:
    # cluster/worker pulls the engine in, so the rest of cluster may not have it, though it lies below cluster
    if other == "cluster/worker":
        return room in ("cluster/worker", "cli")
    return any(other == a or other.startswith(a + "/") for a in allowed)


def decide_without_doing(module: Module) -> Iterator[str]:
    """Rooms that decide import no torch, no sockets, no clock, no event loop."""
    if module.room.split("/")[0] not in DECIDE:
        return
    for line, target in imports(module):
        if target.split(".")[0] in DECIDE_BANNED:
            yield f"{module.name}:{line}: {module.room} only decides, it may not import {target}"


def no_late_import(module: Module) -> Iterator[str]:
    """Imports stand at the top, but for the command line and the loaders; never inside ``try``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Try | ast.TryStar):
            for part in ast.walk(node):
                if isinstance(part, ast.Import | ast.ImportFrom):
                    yield f"{module.name}:{part.lineno}: import inside try"
        if module.name.startswith(LATE):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ast.walk(node):
                if isinstance(part, ast.Import | ast.ImportFrom):
                    yield f"{module.name}:{part.lineno}: import inside a function"
        if isinstance(node, ast.Call) and _name(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield f"{module.name}:{node.lineno}: import by name outside the loaders"


def no_pickle(module: Module) -> Iterator[str]:
    """Nothing that can run code out of data: pickle, its relatives, and calls that use it inside."""
    for line, target in imports(module):
        if target.split(".")[0] in PICKLE_MODULES or target in PICKLE_CALLS:
            yield f"{module.name}:{line}: {target}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (_name(node) in PICKLE_CALLS or node.attr in PICKLE_METHODS):
            yield f"{module.name}:{node.lineno}: {_name(node)} uses pickle"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"{module.name}:{node.lineno}: allow_pickle"


def environment_in_one_file(module: Module) -> Iterator[str]:
    """``os.environ`` and its relatives only in base/env.py."""
    if module.name == "base/env.py":
        return
    for line, target in imports(module):
        if target.startswith("os.") and target[3:] in ENVIRONMENT:
            yield f"{module.name}:{line}: {target} outside base/env.py"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _name(node).startswith("os.") and node.attr in ENVIRONMENT:
            yield f"{module.name}:{node.lineno}: {_name(node)} outside base/env.py"


def one_base_class(module: Module) -> Iterator[str]:
    """At most one base class beside Protocol and Generic, and no mixins."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            names = [_name(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases]
            real = [n for n in names if n.split(".")[-1] not in ("Protocol", "Generic")]
            if len(real) > 1:
                yield f"{module.name}:{node.lineno}: {node.name} has base classes {', '.join(real)}, at most one"
            if "mixin" in node.name.lower():
                yield f"{module.name}:{node.lineno}: {node.name} is a mixin"


def no_module_state(module: Module) -> Iterator[str]:
    """No container at module level that is not a constant, no change of a constant, no ``global``."""
    constants = set()
    for line, name, value in _module_assignments(module.tree):
        if name == "__all__":
            continue
        if name.lstrip("_").isupper():
            constants.add(name)
        elif _is_container(value):
            yield f"{module.name}:{line}: {name} is mutable state of the module"
    for function in ast.walk(module.tree):
        if isinstance(function, ast.Global):
            yield f"{module.name}:{function.lineno}: global {', '.join(function.names)}"
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Subscript | ast.Call) and (name := _changed_name(node)) in constants:
                    yield f"{module.name}:{node.lineno}: changes the constant {name}"


def no_utils(module: Module) -> Iterator[str]:
    """No file that is named after nothing."""
    if module.name.split("/")[-1] in ("utils.py", "util.py", "helpers.py", "misc.py", "common.py"):
        yield f"{module.name}:1: name it after what it holds"


def no_machine_path(name: str, source: str) -> Iterator[str]:
    """No absolute path of somebody's machine in any text of the repository."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := MACHINE_PATH.search(line):
            yield f"{name}:{number}: a path of one machine: {found.group()}"


def tests_that_cannot_fail(name: str, source: str, helpers: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every test function asserts, expects an error, or calls a function that does; no test imports bench.

    ``helpers`` are functions of other test files that do, from :func:`asserting`.
    """
    module = Module(name, source)
    for line, target in imports(module):
        if target.split(".")[0] == "bench":
            yield f"{name}:{line}: a test imports {target}"
    sure = asserting(source, helpers)
    tests = [f for f in _functions(module.tree) if f.name.startswith("test")]
    for function in tests:
        if function.name not in sure:
            yield f"{name}:{function.lineno}: {function.name} asserts nothing"
    if name.split("/")[-1].startswith("test_") and not sure - helpers and not tests:
        yield f"{name}:1: asserts nothing"


def asserting(source: str, helpers: frozenset[str] = frozenset()) -> frozenset[str]:
    """``helpers`` and the names of functions that can fail a test: they assert, or (if no test themselves) raise or run out of time."""
    found = _functions(ast.parse(source))
    sure = {
        f.name for f in found if any(_asserts(n, f.name.startswith("test")) for n in ast.walk(f))
    } | helpers
    size = -1
    while len(sure) != size:
        size = len(sure)
        sure |= {f.name for f in found if any(_calls(n, sure) for n in ast.walk(f))}
    return frozenset(sure)


RULES = (
    import_direction,
    decide_without_doing,
    no_late_import,
    no_pickle,
    environment_in_one_file,
    one_base_class,
    no_module_state,
    no_utils,
)


def _name(node: ast.expr) -> str:
    """``a.b.c`` of a chain of attributes, or an empty start when it hangs on something else."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _module_assignments(tree: ast.Module) -> Iterator[tuple[int, str, ast.expr]]:
    """Assignments that run when the module is imported, outside of functions and classes."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, t.id, node.value) for t in targets if isinstance(t, ast.Name))


def _is_container(value: ast.expr) -> bool:
    literal = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, literal) or (
        isinstance(value, ast.Call) and _name(value.func).split(".")[-1] in CONTAINERS
    )


def _changed_name(node: ast.Subscript | ast.Call) -> str:
    """The name that ``NAME[...] = x``, ``del NAME[...]`` or ``NAME.append(x)`` changes, or an empty string."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return _name(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return _name(node.func.value)
    return ""


def _asserts(node: ast.AST, in_test: bool) -> bool:
    if isinstance(node, ast.Call):
        last = _name(node.func).split(".")[-1]
        waits = last in ("timeout", "wait_for") and not in_test
        return waits or last in ("raises", "fail", "warns") or last.startswith(("assert_", "check"))
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and not in_test)


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _name(node.func).split(".")[-1] in names


def package() -> list[Module]:
    """Every file of src/kilat."""
    root = ROOT / "src/kilat"
    return [
        Module(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8"))
        for p in sorted(root.rglob("*.py"))
    ]


def texts() -> Iterator[tuple[str, str]]:
    """(path, content) of every text that a reader of the repository sees, tests excepted."""
    folders = [
        p for f in ("src", "native", "bench", "tools", "docs", ".ci") for p in sorted((ROOT / f).rglob("*"))
    ]
    for path in [*folders, *sorted(ROOT.glob("*"))]:
        if path.is_file() and path.suffix in (
            "",
            ".py",
            ".md",
            ".txt",
            ".toml",
            ".sh",
            ".c",
            ".h",
            ".cpp",
            ".cu",
        ):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def main() -> int:
    """Print every broken rule; return the exit code."""
    found = [line for module in package() for rule in RULES for line in rule(module)]
    found += [line for name, text in texts() for line in no_machine_path(name, text)]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
