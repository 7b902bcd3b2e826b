"""Print what an install of kilat weighs: version, licence and size of each direct run-time dependency, and the total.

    python tools/dependencies.py

Sizes are those of the installed files, each with everything it needs that no dependency above it in the list has brought already.
"""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
MAX_DIRECT = 25
MAX_BYTES_WITHOUT_TORCH = 300_000_000


def direct() -> list[str]:
    """Names of the direct run-time dependencies, as pyproject.toml lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line).name for line in project["dependencies"]]


def closure(name: str, leave_out: frozenset[str] = frozenset()) -> set[str]:
    """Names of everything that ``name`` needs here, itself too, but for ``leave_out`` and what only that needs."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        dist = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if dist in found or dist in leave_out:
            continue
        found.add(dist)
        needs = [Requirement(line) for line in metadata.requires(dist) or []]
        waiting += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def n_bytes(dist: str) -> int:
    """Bytes of the installed files of one package."""
    paths = [Path(str(f.locate())) for f in metadata.files(dist) or []]
    return sum(p.stat().st_size for p in paths if p.is_file())


def bytes_without_torch() -> int:
    """Bytes of all run-time dependencies, torch and what only torch needs left out."""
    parts = [closure(name, frozenset({"torch"})) for name in direct()]
    return sum(n_bytes(dist) for dist in set().union(*parts))


def licence(dist: str) -> str:
    """The licence that a package states, in a few words."""
    about = metadata.metadata(dist).json  # keys in lower case, values as text or lists
    classifiers = [c.split(" :: ")[-1] for c in about.get("classifier", []) if c.startswith("License ::")]
    stated = about.get("license_expression") or ", ".join(classifiers) or about.get("license") or "not stated"
    return str(stated).splitlines()[0]


def main() -> int:
    """Print the table; return 1 when the budget is broken."""
    names = direct()
    have: set[str] = set()
    print(f"{'package':<20}{'version':<14}{'MB':>7}{'with needs':>12}  licence")
    for name in sorted(names, key=lambda n: n == "torch"):
        needs = closure(name) - have
        have |= needs
        total = sum(n_bytes(d) for d in needs)
        print(
            f"{name:<20}{metadata.version(name):<14}{n_bytes(name) / 1e6:>7.1f}{total / 1e6:>12.1f}  {licence(name)}"
        )
    without_torch = bytes_without_torch()
    print(
        f"{len(names)} direct (limit {MAX_DIRECT}); {without_torch / 1e6:.1f} MB without torch "
        f"(limit {MAX_BYTES_WITHOUT_TORCH / 1e6:.0f})"
    )
    return 1 if len(names) > MAX_DIRECT or without_torch > MAX_BYTES_WITHOUT_TORCH else 0


if __name__ == "__main__":
    sys.exit(main())
