"""Names of metrics: unique, in Prometheus' form, and each of them is used by the room it belongs to."""

import re
from pathlib import Path

import pytest

import kilat
from kilat.base import metrics

pytestmark = pytest.mark.logic

NAMES: dict[str, str] = {k: v for k, v in vars(metrics).items() if k.isupper()}
SOURCE = Path(kilat.__file__).parent


def test_names_are_unique() -> None:
    assert len(set(NAMES.values())) == len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES.values())
def test_name_has_the_prefix_and_prometheus_form(name: str) -> None:
    assert re.fullmatch(r"kilat(_[a-z0-9]+)+", name)


@pytest.mark.parametrize("name", NAMES.values())
def test_unit_stands_before_total(name: str) -> None:
    """What is measured in seconds says so, at the end or before ``_total``; no other unit of time is used."""
    words = name.removesuffix("_total").split("_")
    assert not {"ms", "us", "ns", "milliseconds", "microseconds"} & set(words)
    assert "seconds" not in words[:-1]


@pytest.fixture(scope="module")
def used() -> set[str]:
    """The constants that some room uses."""
    uses = re.compile(r"\b(?:metrics|names)\.([A-Z_]+)\b")
    files = [p for p in SOURCE.rglob("*.py") if p != SOURCE / "base" / "metrics.py"]
    return {name for p in files for name in uses.findall(p.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("constant", NAMES)
def test_constant_is_used_by_some_room(constant: str, used: set[str]) -> None:
    assert constant in used


def test_no_other_file_spells_a_name_of_a_metric() -> None:
    spelled = re.compile(rf"[\"']({'|'.join(NAMES.values())})[\"']")
    files = [p for p in SOURCE.rglob("*.py") if p != SOURCE / "base" / "metrics.py"]
    assert [p.name for p in files if spelled.search(p.read_text(encoding="utf-8"))] == []
