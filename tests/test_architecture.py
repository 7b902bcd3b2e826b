"""The house stands as docs/architecture.md says: the rules of tools/ hold for the tree, and each of them can catch what it forbids."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tools import architecture, sizes
from tools.architecture import Module

pytestmark = pytest.mark.logic

TESTS = sorted((sizes.ROOT / "tests").rglob("*.py"))


@pytest.fixture(scope="module")
def package() -> list[Module]:
    """The files of src/kilat, read and parsed once."""
    return architecture.package()


@pytest.mark.parametrize("rule", architecture.RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Callable[[Module], Iterator[str]], package: list[Module]) -> None:
    assert [line for module in package for line in rule(module)] == []


def test_package_has_no_machine_paths() -> None:
    assert [
        line for name, text in architecture.texts() for line in architecture.no_machine_path(name, text)
    ] == []


def test_files_and_functions_keep_their_budgets() -> None:
    paths = sizes.files("src", "native", "tests", "tools", "bench")
    assert len(paths) > 20
    over = [x for p in paths for x in sizes.over_budget(p.relative_to(sizes.ROOT).as_posix(), p.read_text())]
    assert over == []


@pytest.mark.parametrize("room", sizes.LOGIC_ROOMS)
def test_logic_room_has_more_lines_of_tests_than_of_code(room: str) -> None:
    code, tests = sizes.room_lines(room)
    assert 0 < code <= tests


def test_every_test_can_fail() -> None:
    sources = {p.relative_to(sizes.ROOT).as_posix(): p.read_text() for p in TESTS}
    helpers = frozenset().union(*(architecture.asserting(s) for n, s in sources.items() if "/test_" not in n))
    found = [x for n, s in sources.items() for x in architecture.tests_that_cannot_fail(n, s, helpers)]
    assert found == []


def test_table_of_rooms_has_no_cycle() -> None:
    done: set[str] = set()
    waiting = dict(architecture.ROOMS)
    while ready := [r for r, uses in waiting.items() if not {*uses.split()} & {*waiting} - {r}]:
        done |= {*ready}
        for room in ready:
            del waiting[room]
    assert waiting == {} and done == {*architecture.ROOMS}


IMPORT_EVERYTHING = """
import importlib, pathlib, sys
sys.modules["torch"] = None  # makes `import torch` fail, wherever it stands
root = pathlib.Path(sys.argv[1])
for part in sys.argv[2:]:
    path = root / part
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
        if file.stem == "__main__":
            continue
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(name)
        print(name)
"""


@pytest.mark.parametrize(
    "part", ["base", "wire", "policy", "sim", "text", "cluster/gateway", "cluster/launch", "cli"]
)
def test_part_imports_where_torch_is_missing(part: str) -> None:
    root = sizes.ROOT / "src/kilat"
    command = [sys.executable, "-c", IMPORT_EVERYTHING, str(root), part]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert f"kilat.{part.replace('/', '.')}" in ran.stdout


def test_import_without_torch_notices_torch(tmp_path) -> None:
    (tmp_path / "kilat_part.py").write_text("import torch\n")
    command = [sys.executable, "-c", IMPORT_EVERYTHING, str(tmp_path), "kilat_part"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path.parent)
    assert ran.returncode != 0 and "torch" in ran.stderr


PLANTED = [
    (architecture.import_direction, "policy/sched/x.py", "from kilat.text.tokenizer import Tokenizer"),
    (architecture.import_direction, "policy/sched/x.py", "from kilat.policy import route"),
    (architecture.import_direction, "policy/cache/x.py", "import kilat.policy.sched.plan"),
    (architecture.import_direction, "policy/cache/x.py", "from ..sched import plan"),
    (architecture.import_direction, "wire/x.py", "def f():\n    from kilat.engine import core"),
    (
        architecture.import_direction,
        "text/x.py",
        "if TYPE_CHECKING:\n    from kilat.load.sources import ModelFiles",
    ),
    (architecture.import_direction, "ops/x.py", "from kilat.policy.sched.plan import Row"),
    (architecture.import_direction, "cluster/gateway/x.py", "from kilat.engine.core import Engine"),
    (architecture.import_direction, "cluster/launch.py", "from kilat.cluster.worker import loop"),
    (architecture.import_direction, "base/x.py", "import msgspec"),
    (architecture.import_direction, "engine/x.py", "from bench import run"),
    (architecture.import_direction, "shed/x.py", "import math"),
    (architecture.decide_without_doing, "policy/sched/x.py", "import torch.nn"),
    (architecture.decide_without_doing, "text/x.py", "from time import monotonic"),
    (architecture.decide_without_doing, "wire/x.py", "import asyncio"),
    (architecture.decide_without_doing, "policy/heal/x.py", "import socket"),
    (architecture.no_late_import, "engine/x.py", "def f():\n    import json"),
    (
        architecture.no_late_import,
        "engine/x.py",
        "class A:\n    async def f(self):\n        from json import loads",
    ),
    (architecture.no_late_import, "engine/x.py", "json = importlib.import_module('json')"),
    (architecture.no_late_import, "cli/x.py", "try:\n    import rich\nexcept ImportError:\n    rich = None"),
    (architecture.no_late_import, "cli/x.py", "try:\n    pass\nfinally:\n    import rich"),
    (architecture.no_pickle, "kv/x.py", "import pickle"),
    (architecture.no_pickle, "kv/x.py", "from marshal import loads"),
    (architecture.no_pickle, "kv/x.py", "import shelve as s"),
    (architecture.no_pickle, "load/x.py", "w = torch.load('x.pt')"),
    (architecture.no_pickle, "load/x.py", "from torch import load"),
    (architecture.no_pickle, "load/x.py", "w = numpy.load('x.npy', allow_pickle=True)"),
    (architecture.no_pickle, "kv/x.py", "socket.send_pyobj(3)"),
    (architecture.environment_in_one_file, "cli/x.py", "import os\nport = os.environ['PORT']"),
    (architecture.environment_in_one_file, "cli/x.py", "import os\nport = os.getenv('PORT')"),
    (architecture.environment_in_one_file, "base/log.py", "from os import environ"),
    (architecture.one_base_class, "engine/x.py", "class A(B, C): ..."),
    (architecture.one_base_class, "engine/x.py", "class A(B, Protocol, base.C): ..."),
    (architecture.one_base_class, "engine/x.py", "class RetryMixin: ..."),
    (architecture.no_module_state, "engine/x.py", "sessions = {}"),
    (architecture.no_module_state, "engine/x.py", "sessions: list[int] = []"),
    (architecture.no_module_state, "engine/x.py", "if True:\n    seen = set()"),
    (architecture.no_module_state, "engine/x.py", "from collections import deque\nqueue = deque()"),
    (architecture.no_module_state, "engine/x.py", "_CACHE = {}\ndef f(k):\n    _CACHE[k] = 1"),
    (architecture.no_module_state, "engine/x.py", "CACHE = []\ndef f(k):\n    CACHE.append(k)"),
    (architecture.no_module_state, "engine/x.py", "n = 0\ndef f():\n    global n\n    n += 1"),
    (architecture.no_utils, "engine/utils.py", ""),
]


@pytest.mark.parametrize(("rule", "name", "source"), PLANTED, ids=lambda x: getattr(x, "__name__", None))
def test_rule_catches_planted_violation(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    found = list(rule(Module(name, source)))
    assert len(found) == 1
    assert found[0].startswith(f"{name}:")


LAWFUL = [
    ("policy/sched/x.py", "from kilat.policy.cache.pool import PagePool\nfrom kilat.wire import session"),
    ("cluster/worker/__main__.py", "def main():\n    from kilat.engine.build import build_engine"),
    ("cluster/worker/loop.py", "from kilat.engine.core import Engine\nfrom kilat.cluster.auth import key"),
    ("cluster/launch.py", "from kilat.cluster.gateway.app import app"),
    ("models/registry.py", "def load(name):\n    return importlib.import_module(name)"),
    ("cli/main.py", "def serve():\n    from kilat.cluster.launch import serve"),
    ("__init__.py", "__all__ = ['LLM']"),
    ("base/env.py", "import os\nname = os.environ.get('KILAT_LOG')"),
    (
        "ops/x.py",
        "import torch\nTILES = {16: 64}\ndef f():\n    seen = []\n    seen.append(TILES[16])\n    return seen",
    ),
    ("wire/x.py", "class A(msgspec.Struct, frozen=True):\n    ids: list[int] = []"),
    ("nn/x.py", "class A(Protocol, Generic[T]): ...\nclass B(Module, Protocol): ..."),
]


@pytest.mark.parametrize(("name", "source"), LAWFUL, ids=[name for name, _ in LAWFUL])
def test_lawful_code_breaks_no_rule(name: str, source: str) -> None:
    assert [line for rule in architecture.RULES for line in rule(Module(name, source))] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("src/kilat/engine/x.py", "x = 1\n" * 401),
        ("native/x.c", "int x;\n" * 401),
        ("src/kilat/models/x.py", "x = 1\n" * 251),
        ("src/kilat/engine/x.py", "def f():\n" + "    x = 1\n" * 60),
        ("src/kilat/engine/x.py", "class A:\n  def f(self):\n" + "    x = 1\n" * 60),
        ("src/kilat/ops/x.py", "def f():\n" + "    x = 1\n" * 150),
        ("src/kilat/engine/x.py", "def f(a, b, c, d, e, /, f, *, g, h, i): ..."),
        ("src/kilat/engine/x.py", "def f(a, b, c, d, e, f, g, *h, **i): ..."),
    ],
)
def test_too_large_is_caught(name: str, source: str) -> None:
    assert len(list(sizes.over_budget(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("src/kilat/engine/x.py", "x = 1\n" * 400),
        ("src/kilat/models/x.py", "x = 1\n" * 250),
        ("src/kilat/engine/x.py", "def f():\n" + "    x = 1\n" * 59),
        ("src/kilat/ops/x.py", "def f():\n" + "    x = 1\n" * 149),
        ("src/kilat/engine/x.py", "class A:\n  def f(self, a, b, c, d, e, f, g, h): ..."),
        ("src/kilat/ops/triton/x.py", "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): ..."),
    ],
)
def test_exactly_at_the_budget_is_allowed(name: str, source: str) -> None:
    assert list(sizes.over_budget(name, source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def test_a():\n    print(1)",
        "import pytest\n\ndef helper():\n    return 1\n\ndef test_a():\n    helper()",
        "class TestA:\n    def test_b(self):\n        pass\n\ndef test_c():\n    assert 1",
        "from hypothesis import given",
        "from bench.ops import run\n\ndef test_a():\n    assert run()",
    ],
)
def test_test_that_cannot_fail_is_caught(source: str) -> None:
    assert len(list(architecture.tests_that_cannot_fail("tests/x/test_x.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def test_a():\n    assert f() == 1",
        "def test_a():\n    with pytest.raises(ValueError):\n        f()",
        "def same(a, b):\n    assert a == b\n\ndef both(a):\n    same(a, a)\n\ndef test_a():\n    both(1)",
        "def until(f):\n    with timeout(10):\n        while not f():\n            pause()\n\ndef test_a():\n    until(f)",
        "from tests.x import until\n\ndef test_a():\n    until(f)",
        "class M(RuleBasedStateMachine):\n    @invariant()\n    def holds(self):\n        assert self.x\n\nTestM = M.TestCase",
    ],
)
def test_test_that_can_fail_is_accepted(source: str) -> None:
    helpers = architecture.asserting("def until(f):\n    if not f():\n        raise TimeoutError")
    assert list(architecture.tests_that_cannot_fail("tests/x/test_x.py", source, helpers)) == []


@pytest.mark.parametrize("text", ["see /home/ada/kilat", "x = '/root/models'", "cd /opt/kilat && ls"])
def test_machine_path_is_caught(text: str) -> None:
    assert len(list(architecture.no_machine_path("docs/x.md", text))) == 1


@pytest.mark.parametrize(
    "text", ["GET /v1/models", "~/.cache/kilat", "src/kilat/work/x", "https://host/opt/x"]
)
def test_other_paths_are_no_machine_paths(text: str) -> None:
    assert list(architecture.no_machine_path("docs/x.md", text)) == []
