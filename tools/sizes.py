"""Measure files, functions and parameter lists against the budgets, and print them room by room.

    python tools/sizes.py [--quiet]

Exits 1 when something is over its budget. tests/test_architecture.py runs the same functions.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 400
MODEL_FILE_LINES = 250
FUNCTION_LINES = 60
KERNEL_LINES = 150
PARAMETERS = 8
# rooms that only decide: their tests are at least as long as their code
LOGIC_ROOMS = ("base", "policy", "sim", "text", "wire")
SUFFIXES = (".py", ".c", ".h", ".cpp", ".cu")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: str) -> list[Path]:
    """Source files below these folders of the repository, sorted; a folder that does not exist has none."""
    found = (p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
    return sorted(p for p in found if "__pycache__" not in p.parts)


def n_lines(paths: list[Path]) -> int:
    """Lines of all these files, blank ones and comments included."""
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in paths)


def functions(tree: ast.Module) -> list[Function]:
    """All functions and methods, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def length(function: Function) -> int:
    """Lines from ``def`` to the end, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def n_parameters(function: Function) -> int:
    """Parameters that a caller can fill; ``self`` and ``cls`` do not count."""
    a = function.args
    named = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + (a.vararg is not None) + (a.kwarg is not None)


def is_device_code(function: Function) -> bool:
    """A Triton kernel: compiled for a device, where no struct can be passed."""
    return any(ast.unparse(d).startswith(("triton.jit", "gluon.jit")) for d in function.decorator_list)


def over_budget(name: str, source: str) -> Iterator[str]:
    """What is too large in one file. ``name`` is its path from the root of the repository, with ``/``."""
    limit = MODEL_FILE_LINES if name.startswith("src/kilat/models/") else FILE_LINES
    count = len(source.splitlines())
    if count > limit:
        yield f"{name}: {count} lines, limit {limit}: split it by what it holds"
    if not name.endswith(".py"):
        return
    limit = KERNEL_LINES if name.startswith(("src/kilat/ops/", "native/")) else FUNCTION_LINES
    for function in functions(ast.parse(source)):
        where = f"{name}:{function.lineno}: {function.name}"
        if length(function) > limit:
            yield f"{where} has {length(function)} lines, limit {limit}"
        if name.startswith(("tests/", "bench/")) or is_device_code(function):
            continue
        if n_parameters(function) > PARAMETERS:
            yield f"{where} has {n_parameters(function)} parameters, limit {PARAMETERS}: pass a struct"


def room_lines(room: str) -> tuple[int, int]:
    """Lines of code and of tests of one room."""
    return n_lines(files(f"src/kilat/{room}")), n_lines(files(f"tests/{room}"))


def main() -> int:
    """Print the table (unless --quiet) and what is over budget; return the exit code."""
    if "--quiet" not in sys.argv:
        print(f"{'room':<10}{'files':>6}{'code':>7}{'tests':>7}  largest file")
        for folder in sorted(p for p in (ROOT / "src/kilat").iterdir() if files(f"src/kilat/{p.name}")):
            paths = files(f"src/kilat/{folder.name}")
            largest = max(paths, key=lambda p: n_lines([p]))
            code, tests = room_lines(folder.name)
            print(
                f"{folder.name:<10}{len(paths):>6}{code:>7}{tests:>7}"
                f"  {largest.relative_to(folder)} {n_lines([largest])}"
            )
        print(
            f"budgets: file {FILE_LINES} (models {MODEL_FILE_LINES}), function {FUNCTION_LINES} (ops {KERNEL_LINES}), "
            f"{PARAMETERS} parameters"
        )
    found = [
        line
        for path in files("src", "native", "tests", "tools", "bench")
        for line in over_budget(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
