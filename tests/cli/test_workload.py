"""Prompts of benchmarks: seeded words, and files in the forms that people have."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import ConfigError
from kilat.cli.workload import Request, fresh, random_requests, read_dataset

pytestmark = pytest.mark.logic

ROWS = [{"prompt": "one\ntwo", "output_tokens": 3, "more": 1}, {"prompt": "{x}", "output_tokens": 9}]


@given(st.integers(1, 20), st.integers(1, 50), st.text(max_size=5))
def test_random_prompts_are_a_function_of_the_seed(n: int, words: int, seed: str) -> None:
    requests = random_requests(n, words, 7, seed)
    assert requests == random_requests(n, words, 7, seed)
    assert len(requests) == n and all(len(r.prompt.split(" ")) == words for r in requests)


def test_random_prompts_share_no_long_beginning() -> None:
    starts = {r.prompt[:60] for r in random_requests(500, 64, 1, "s")}
    assert len(starts) == 500


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=1),
        json.dumps({"source": "x", "requests": ROWS}),
        json.dumps({"requests": ROWS}, indent=1),
        "\n".join(json.dumps(r) for r in ROWS) + "\n\n",
    ],
)
def test_dataset_is_read_in_every_form(text: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    assert read_dataset(file, 2) == [Request("one\ntwo", 3), Request("{x}", 9)]


def test_one_jsonl_row_is_a_dataset(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": 'say "requests"', "output_tokens": 2}))
    assert read_dataset(file, 1) == [Request('say "requests"', 2)]


def test_short_dataset_is_gone_through_again(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(ROWS))
    assert [r.output_tokens for r in read_dataset(file, 5)] == [3, 9, 3, 9, 3]
    assert len(read_dataset(file, 1)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1]",
        "{}",
        "not json",
        '{"prompt": "x"}',
        '{"prompt": "", "output_tokens": 1}',
        '[{"prompt": "x", "output_tokens": 0}]',
    ],
)
def test_file_of_another_form_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"data\.json"):
        read_dataset(file, 2)


def test_later_rounds_begin_differently_so_that_no_cached_prefix_helps() -> None:
    requests = random_requests(3, 8, 2, "s")
    rounds = [fresh(requests, r) for r in range(3)]
    assert rounds[0] == requests
    for a, b, c in zip(*rounds):
        assert len({a.prompt.split()[0], b.prompt.split()[0], c.prompt.split()[0]}) == 3
        assert b.prompt.endswith(a.prompt) and b.output_tokens == a.output_tokens
