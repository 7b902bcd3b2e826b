"""The promises of docs/decisions/0002-dependencies.md: few dependencies, each with its reason, all pinned, and a small install."""

import re

import pytest
from packaging.requirements import Requirement

from tools import dependencies

pytestmark = pytest.mark.logic

CONSTRAINTS = [
    Requirement(line)
    for line in (dependencies.ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_number_of_direct_dependencies_is_limited() -> None:
    assert 0 < len(dependencies.direct()) <= dependencies.MAX_DIRECT


def test_each_direct_dependency_has_exactly_one_line_with_its_reason() -> None:
    text = (dependencies.ROOT / "docs/decisions/0002-dependencies.md").read_text()
    lines = re.findall(r"^\| ([a-z0-9-]+) \|(.*)\|$", text, re.MULTILINE)
    named = [name for name, _ in lines if name not in ("package", "---")]
    assert sorted(named) == sorted(dependencies.direct())
    assert all(all(cell.strip() for n, cell in enumerate(rest.split("|")) if n != 2) for _, rest in lines)


def test_install_without_torch_is_small() -> None:
    assert 10_000_000 < dependencies.bytes_without_torch() < dependencies.MAX_BYTES_WITHOUT_TORCH


def test_closure_leaves_out_torch_and_what_only_torch_needs() -> None:
    assert {"torch", "sympy"} <= dependencies.closure("torch")
    assert "sympy" not in dependencies.closure("kilat", frozenset({"torch"}))


def test_everything_that_kilat_needs_is_pinned_to_one_version() -> None:
    pinned = {canonical(r.name) for r in CONSTRAINTS if [s.operator for s in r.specifier] == ["=="]}
    assert len(pinned) == len(CONSTRAINTS)
    assert dependencies.closure("kilat") - {"kilat"} <= pinned


def test_pins_name_no_build_of_one_machine() -> None:
    assert [str(r) for r in CONSTRAINTS if "+" in str(r.specifier) or r.url] == []
