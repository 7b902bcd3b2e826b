"""What every test gets: one marker that says what it needs, cheap tests first, and no deadline for hypothesis on a shared machine."""

import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings

NEEDS = ("logic", "cpu", "gpu", "multi_gpu", "cluster", "browser", "e2e")

settings.register_profile("kilat", deadline=None, print_blob=True)
settings.register_profile("kilat-ci", parent=settings.get_profile("ci"), deadline=None)
settings.load_profile("kilat-ci" if settings.get_current_profile_name() == "ci" else "kilat")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that; tests that press Ctrl-C need it to work."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files of needs that ``-m`` does not ask for: ``-m logic`` must not import torch."""
    asked = config.option.markexpr
    if not asked or not collection_path.name.startswith("test_"):
        return None
    if not {*re.findall(r"\w+", asked)} <= {*NEEDS, "and", "or", "not"}:
        return None
    named = {*re.findall(r"\bmark\.(\w+)", collection_path.read_text(encoding="utf-8"))} & {*NEEDS}
    wanted = [n for n in named if eval(asked, {}, {need: need == n for need in NEEDS})]
    return True if named and not wanted else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by need, so that a broken rule shows in seconds; a test with no marker, or with two, is an error."""
    rank = {}
    for item in items:
        needs = [n for n in NEEDS if item.get_closest_marker(n)]
        if len(needs) != 1:
            raise pytest.UsageError(
                f"{item.nodeid} has the markers {needs}, wanted exactly one of {', '.join(NEEDS)}"
            )
        rank[item] = NEEDS.index(needs[0])
    items.sort(key=rank.__getitem__)
