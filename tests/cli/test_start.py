"""`kilat --help` is quick, needs no heavy package, and the commands that talk to servers do without torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kilat
from kilat.cli.machine import source_sha

pytestmark = pytest.mark.cluster

BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None  # an import of it raises ImportError
"""


def python(code: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "line", ["--help", "--version", "serve --help", "bench serve --help", "model list --help"]
)
def test_help_needs_neither_torch_nor_rich_nor_httpx(line: str) -> None:
    blocked = BLOCKED.format(names=("torch", "rich", "httpx", "numpy", "msgspec", "asyncio"))
    code = blocked + "from kilat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = python(code, *line.split())
    assert done.returncode == 0, done.stderr
    assert kilat.__version__ in done.stdout if line == "--version" else "usage: kilat" in done.stdout


def test_help_takes_under_150_ms() -> None:
    # CPU time: it waits for nothing, and this machine may be busy with other things
    times = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-m", "kilat.cli", "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        times.append(usage.ru_utime + usage.ru_stime)
    assert min(times) < 0.150


@pytest.mark.parametrize(
    "file", ["chat", "run", "bench", "serve", "model", "doctor", "top", "drain", "cache", "up"]
)
def test_command_file_needs_no_torch(file: str) -> None:
    done = python(BLOCKED.format(names=("torch",)) + f"import kilat.cli.{file}")
    assert done.returncode == 0, done.stderr


def test_script_and_module_are_the_same_program() -> None:
    script = Path(sys.executable).with_name("kilat")
    for command in ([str(script)], [sys.executable, "-m", "kilat.cli"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"kilat {kilat.__version__}\n"


def test_commit_is_that_of_a_checkout_and_none_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = source_sha()
    assert sha is None or re.fullmatch(r"[0-9a-f]{12}\+?", sha)
    monkeypatch.setattr(kilat, "__file__", str(tmp_path / "src" / "kilat" / "__init__.py"))
    assert source_sha() is None
