"""kilat-native as ``make native`` builds it: once per version of its sources, kept in the cache folder, for it takes minutes."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from kilat.base import env

NATIVE = Path(__file__).resolve().parents[2] / "native"
PARTS = ("Makefile", "include", "runtime", "cpu", "tools")


def version() -> str:
    """Names everything that the program is made of: paths and bytes of its sources, and the compiler."""
    digest = hashlib.blake2b(digest_size=12)
    compiler = Path(shutil.which("g++") or "g++").resolve()
    digest.update(f"{compiler} {compiler.stat().st_size if compiler.exists() else 0}".encode())
    for part in PARTS:
        for path in sorted([NATIVE / part, *(NATIVE / part).rglob("*")]):
            if path.is_file():
                digest.update(f"\0{path.relative_to(NATIVE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def built(folder: Path) -> Path:
    """Path of the program; built in ``folder`` by all cores where there is none of this version."""
    kept = env.cache_dir() / "native" / f"kilat-native-{version()}"
    if not kept.exists():
        made = folder / "kilat-native"
        command = ["make", "-s", "-C", str(NATIVE), f"-j{os.cpu_count()}", f"OUT={folder}", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copy2(made, whole)
        os.replace(whole, kept)
    return kept
