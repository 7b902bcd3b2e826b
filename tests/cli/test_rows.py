"""Rows of a batch input, good and bad."""

import hashlib
import json
from pathlib import Path

import pytest

from kilat.base.errors import ConfigError
from kilat.cli import rows
from kilat.cli.rows import CHAT, COMPLETIONS, Row

pytestmark = pytest.mark.logic

MESSAGES = [{"role": "user", "content": "hi"}]


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return path


def test_rows_of_every_form_become_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "custom_id": "a",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "gpt", "messages": MESSAGES, "stream": True},
        },
        {"messages": MESSAGES, "max_tokens": 5},
        b"",
        {"custom_id": "b", "prompt": "x", "stream_options": {}},
        {"custom_id": "c", "body": {"prompt": [1, 2]}},
    )
    assert list(rows.read(path)) == [
        Row("a", CHAT, {"model": "gpt", "messages": MESSAGES}),
        Row("line-2", CHAT, {"messages": MESSAGES, "max_tokens": 5}),
        Row("b", COMPLETIONS, {"prompt": "x"}),
        Row("c", COMPLETIONS, {"prompt": [1, 2]}),
    ]


def test_index_knows_the_ids_and_the_hash_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x"}, {"custom_id": "b", "prompt": "y"})
    identity, ids = rows.index(path, "m")
    assert ids == {"line-1", "b"}
    assert identity.input_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (identity.n_rows, identity.model) == (2, "m")


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}')
    assert rows.index(path, None)[1] == {"line-1"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"not json", "line 2: not a JSON object"),
        (b"[1]", "line 2: not a JSON object"),
        (b'{"prompt": "\xff"}', "line 2: not a JSON object"),
        (b'{"prompt": "\\ud800"}', "line 2: not a JSON object"),
        (b"[" * 200_000, "line 2: not a JSON object"),
        ({"custom_id": 7, "prompt": "x"}, "custom_id is 7, want text"),
        ({"custom_id": "", "prompt": "x"}, "custom_id is '', want text"),
        ({"custom_id": "a", "prompt": "x"}, "custom_id 'a' is also at line 1"),
        ({"custom_id": "b"}, 'want "messages" or "prompt"'),
        ({"prompt": "x", "messages": []}, 'want "messages" or "prompt"'),
        ({"body": "x"}, 'want "messages" or "prompt"'),
        ({"url": "/v1/embeddings", "body": {"prompt": "x"}}, "url is '/v1/embeddings'"),
        ({"url": COMPLETIONS, "body": {"messages": []}}, "but the body is one for /v1/chat/completions"),
    ],
)
def test_bad_row_is_named_by_its_line_before_anything_runs(line: object, says: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"custom_id": "a", "prompt": "x"}, line)
    with pytest.raises(ConfigError) as error:
        rows.index(path, None)
    assert says in error.value.message and "in.jsonl line 2" in error.value.message


def test_a_made_up_id_may_not_meet_a_given_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: custom_id 'line-2' is also at line 1"):
        rows.index(write(tmp_path, {"custom_id": "line-2", "prompt": "x"}, {"prompt": "y"}), None)


def test_input_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        rows.index(write(tmp_path, b"", b"  "), None)
