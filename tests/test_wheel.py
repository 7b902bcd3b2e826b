"""An install without the checkout has every source that kilat builds from, finds them there, and would build the same libraries."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kilat.ops.cpu.build import compiler, cpu_units

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("src", "native", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
LOOK = """
from kilat.native.build import build as build_runtime
from kilat.ops.cpu import build as building
building._compile = lambda *_: None
print(building.source_dir(), building.build(), build_runtime(), sep="\\n")
"""


def run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel's files, built without a network from the source distribution of this tree."""
    work = tmp_path_factory.mktemp("wheel")
    tree = work / "tree"
    tree.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree)
    make = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run(sys.executable, "-c", make, cwd=tree)
    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
        archive.extractall(work / "sdist", filter="data")
    source = next((work / "sdist").iterdir())
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "-q",
        "--no-index",
        "--no-deps",
    )
    run(*pip, "--no-build-isolation", "--no-cache-dir", "-w", str(work), str(source), cwd=work)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        archive.extractall(work / "installed")
    return work / "installed"


def sources_of_builds() -> set[Path]:
    """Paths below native/ of everything that a build of the kernels, the runtime or its CUDA library reads."""
    native = ROOT / "native"
    waiting = [native / "cpu" / name for name in cpu_units()]
    for pattern in ("runtime/*.cpp", "cuda/*.cu", "include/*.h", "tools/*.c", "Makefile"):
        waiting += native.glob(pattern)
    found: set[Path] = set()
    while waiting:
        path = waiting.pop().resolve()
        # tests bring an emulated device of their own
        if path not in found and not path.is_relative_to(native / "tests"):
            found.add(path)
            waiting += (path.parent / name for name in re.findall(r'#\s*include "([^"]+)"', path.read_text()))
    return {path.relative_to(native) for path in found}


def test_wheel_has_the_sources_of_every_build_as_the_checkout_has_them(installed: Path) -> None:
    needed = sources_of_builds()
    assert {"cpu", "cuda", "include", "runtime", "tools"} <= {path.parts[0] for path in needed}
    wrong = [
        path
        for path in needed
        if not (copy := installed / "kilat" / "native" / path).is_file()
        or copy.read_bytes() != (ROOT / "native" / path).read_bytes()
    ]
    assert wrong == []


def test_wheel_has_every_file_of_the_package(installed: Path) -> None:
    package = ROOT / "src" / "kilat"
    files = {p.relative_to(package) for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert Path("py.typed") in files and any(path.suffix == ".cu" for path in files)
    assert [path for path in files if not (installed / "kilat" / path).is_file()] == []


def test_makefile_in_the_wheel_has_all_that_it_names(installed: Path, tmp_path: Path) -> None:
    # a file that is missing has no rule
    said = run(
        "make", "-n", f"OUT={tmp_path}", "CUDA=/cuda", "-C", str(installed / "kilat/native"), cwd=tmp_path
    )
    assert "cpu/kilat_cpu.cpp" in said and "runtime/runtime.cpp" in said and "cuda/step.cu" in said


def test_installed_package_builds_what_the_checkout_builds(installed: Path, tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    # a library is named by a hash of all that goes into it, so nothing has to be compiled here
    ways = {"PYTHONPATH": str(installed)}, {"PYTHONPATH": str(ROOT / "src")}
    there, here = (
        run(sys.executable, "-P", "-c", LOOK, cwd=tmp_path, KILAT_CACHE_DIR=str(tmp_path), **way).splitlines()
        for way in ways
    )
    assert (there[0], here[0]) == (str(installed / "kilat/native/cpu"), str(ROOT / "native/cpu"))
    assert there[1:] == here[1:] and len({*there}) == 3
