"""Identifiers: unguessable, printable, and a branch can be told from its request."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.ids import branch_id, new_seed, new_session_id

pytestmark = pytest.mark.logic


def test_session_id_has_its_prefix_and_96_random_bits() -> None:
    assert re.fullmatch(r"ses-[0-9a-f]{24}", new_session_id())


def test_session_ids_differ() -> None:
    assert len({new_session_id() for _ in range(2000)}) == 2000


def test_first_sample_has_the_id_of_its_request() -> None:
    assert branch_id("ses-1", 0) == "ses-1"


@given(st.integers(0, 40), st.integers(0, 40))
def test_samples_have_different_ids(a: int, b: int) -> None:
    session_id = new_session_id()
    assert (branch_id(session_id, a) == branch_id(session_id, b)) == (a == b)


@given(st.integers(1, 99))
def test_id_of_a_sample_names_its_request_and_number(k: int) -> None:
    session_id = new_session_id()
    assert branch_id(session_id, k).split("#") == [session_id, str(k)]


def test_seeds_have_63_bits_and_differ() -> None:
    seeds = [new_seed() for _ in range(500)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    assert max(seeds).bit_length() > 58
