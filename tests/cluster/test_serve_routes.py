"""Every route from outside: keys, methods, limits, and input that should have stayed at home."""

import json
import re
import socket
from typing import Any

import httpx
import pytest
from served import Served, eventually

from kilat.cluster.config import MAX_BODY_BYTES, MAX_HEADER_BYTES
from kilat.cluster.gateway.app import ENDPOINTS

pytestmark = pytest.mark.cluster

KEY = "kl_alice_0123456789abcdef"
OTHER_KEY = "kl_bob_fedcba9876543210"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
PATHS = [e.path.replace("{model_id:path}", "tiny") for e in ENDPOINTS]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Any:
    server = Served(tmp_path_factory.mktemp("guarded"), tiny.path, api_keys=[KEY, OTHER_KEY])
    yield server
    server.stop()


def raw(url: str, data: bytes, *, timeout_s: float = 20.0) -> bytes:
    """Everything a server answers to ``data`` until it closes or waits for more."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as s:
        s.sendall(data)
        s.settimeout(2.0)
        got = b""
        try:
            while chunk := s.recv(65536):
                got += chunk
        except TimeoutError:
            pass
    return got


@pytest.mark.parametrize(
    "path",
    [
        *PATHS,
        "/",
        "/nothing",
        "/v1",
        "/v1/models/",
        "/docs",
        "/openapi.json",
        "/health/live/x",
        "//health/live",
    ],
)
def test_no_route_and_no_method_answers_without_a_key(guarded: Served, path: str) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for method in METHODS:
            for headers in (
                {},
                {"authorization": "Bearer wrong-key-0000"},
                {"authorization": f"Basic {KEY}"},
            ):
                status = http.request(method, path, headers=headers).status_code
                if path == "/health/live":
                    assert status == (200 if method in ("GET", "HEAD") else 405)
                else:
                    assert status == 401, (method, path, headers)


def test_refusal_says_how_to_send_a_key(guarded: Served) -> None:
    answer = httpx.get(f"{guarded.url}/v1/models")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer" in answer.json()["error"]["message"]


def test_right_key_opens_every_route(guarded: Served) -> None:
    with httpx.Client(base_url=guarded.url, headers={"authorization": f"Bearer {KEY}"}) as http:
        for e in ENDPOINTS:
            path = e.path.replace("{model_id:path}", "tiny")
            answer = http.request(e.method, path, json={} if e.method == "POST" else None)
            if "{" in path:  # there is no worker or request of that name
                assert (answer.status_code, answer.json()["error"]["param"] is None) == (404, False)
            else:
                assert answer.status_code in (200, 400)
        assert http.get("/nothing").status_code == 404


def test_tenants_do_not_share_cached_pages(guarded: Served) -> None:
    def cached(key: str) -> int:
        answer = httpx.post(
            f"{guarded.url}/v1/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"prompt": "the same long prompt of two tenants " * 3, "max_tokens": 1},
        )
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER_KEY) == 0


def test_keys_are_not_in_the_log(guarded: Served) -> None:
    httpx.get(f"{guarded.url}/v1/models", headers={"authorization": "Bearer wrong-key-0000"})
    httpx.post(
        f"{guarded.url}/v1/completions",
        headers={"authorization": f"Bearer {KEY}"},
        json={"prompt": "private words"},
    )
    log = guarded.log()
    assert "tenant=alice" in log
    assert KEY not in log and "wrong-key" not in log and "private words" not in log


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/metrics")]
)
def test_wrong_method_is_a_405_in_openais_shape(shared_server: Served, method: str, path: str) -> None:
    answer = httpx.request(method, shared_server.url + path)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert "allow" in answer.headers


def test_unknown_path_is_a_404_in_openais_shape(shared_server: Served) -> None:
    answer = httpx.get(f"{shared_server.url}/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_foreign_host_header_is_refused_without_keys_and_fine_with_them(
    shared_server: Served, guarded: Served
) -> None:
    headers = {"host": "evil.example"}
    assert httpx.get(f"{shared_server.url}/v1/models", headers=headers).status_code == 421
    headers["authorization"] = f"Bearer {KEY}"
    assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200


def test_body_over_the_limit_is_a_413_whether_declared_or_not(shared_server: Served) -> None:
    url = f"{shared_server.url}/v1/completions"
    body = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()
    headers = {"content-type": "application/json"}
    assert httpx.post(url, content=body, headers=headers, timeout=30).status_code == 413

    def chunks() -> Any:
        for at in range(0, len(body), 65536):
            yield body[at : at + 65536]

    try:
        assert httpx.post(url, content=chunks(), headers=headers, timeout=30).status_code == 413
    except httpx.WriteError:
        pass  # it answered and closed while we were still writing
    assert httpx.get(f"{shared_server.url}/health/ready").status_code == 200


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES * 8])
@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\r\nX-Other: b\r\n\r\n", b""])
def test_headers_over_the_limit_are_a_431(shared_server: Served, size: int, end: bytes) -> None:
    data = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * size + end
    assert raw(shared_server.url, data).startswith(b"HTTP/1.1 431 ")


def test_many_small_headers_over_the_limit_are_a_431(shared_server: Served) -> None:
    fields = b"".join(b"X-%d: %s\r\n" % (k, b"a" * 100) for k in range(1000))
    data = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + fields + b"\r\n"
    assert raw(shared_server.url, data).startswith(b"HTTP/1.1 431 ")


def test_headers_within_the_limit_are_fine(shared_server: Served) -> None:
    headers = {"x-long": "a" * (MAX_HEADER_BYTES - 1000)}
    assert httpx.get(f"{shared_server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET  HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_a_400_and_a_closed_connection(shared_server: Served, data: bytes) -> None:
    answer = raw(shared_server.url, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_two_requests_in_one_packet_are_both_answered(shared_server: Served) -> None:
    one = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert raw(shared_server.url, one + one).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_body_must_be_declared_as_plain_json(
    shared_server: Served, headers: dict[str, str], status: int
) -> None:
    answer = httpx.post(
        f"{shared_server.url}/v1/completions", content=b'{"prompt": "say:x"}', headers=headers
    )
    assert answer.status_code == status


HELLO = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
            ]
        },
        "messages",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages",
    ),
    ({"messages": HELLO, "model": "other"}, "model"),
    ({"messages": HELLO, "model": 5}, "model"),
    ({"messages": HELLO, "temperature": -1}, "temperature"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "top_p": 0}, "top_p"),
    ({"messages": HELLO, "top_p": 1.5}, "top_p"),
    ({"messages": HELLO, "n": 0}, "n"),
    ({"messages": HELLO, "n": 1000}, "n"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 2**80}, "max_tokens"),
    ({"messages": HELLO, "max_completion_tokens": -5}, "max_completion_tokens"),
    ({"messages": HELLO, "min_tokens": -1}, "min_tokens"),
    ({"messages": HELLO, "seed": 2**64}, "seed"),
    ({"messages": HELLO, "stop": ["a"] * 20}, "stop"),
    ({"messages": HELLO, "stop": [""]}, "stop"),
    ({"messages": HELLO, "stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"1": 500}}, "logit_bias"),
    ({"messages": HELLO, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    ({"messages": HELLO, "stream": "yes"}, "stream"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HELLO, "response_format": {"type": "yaml"}}, "response_format"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": HELLO, "guided_regex": "a" * 5000}, "grammar"),
    ({"messages": HELLO, "guided_choice": []}, "guided_choice"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"messages": HELLO, "tools": [FUNCTION, FUNCTION]}, "tools"),
    (
        {
            "messages": HELLO,
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice",
    ),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"messages": HELLO, "chat_template_kwargs": {"a": {}}}, "chat_template_kwargs"),
    ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": HELLO, "frobnicate": 1}, "frobnicate"),
    ({"messages": HELLO, "prompt": "x"}, "prompt"),
    ({"messages": [{"role": "user", "content": "y" * 1000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "refuse!"}]}, "prompt"),
]
COMPLETION: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [100000]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": ["a"] * 200, "n": 16}, "n"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "logprobs": 100}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "echo": "yes"}, "echo"),
    ({"prompt": "x" * 2000}, "prompt"),
]
RAW = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}',
    b"{" * 50_000,
    b'{"a": NaN}',
]


def check_error(answer: httpx.Response, param: str | None) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["message"] and error["code"] and error["type"]
    assert not re.search(r"Traceback|/src/|\.py|kilat\.", error["message"])


@pytest.mark.parametrize(("body", "param"), CHAT)
def test_bad_chat_request_says_which_field_and_why(
    shared_server: Served, body: dict[str, Any], param: str | None
) -> None:
    check_error(httpx.post(f"{shared_server.url}/v1/chat/completions", json=body), param)


@pytest.mark.parametrize(("body", "param"), COMPLETION)
def test_bad_completion_request_says_which_field_and_why(
    shared_server: Served, body: dict[str, Any], param: str | None
) -> None:
    check_error(httpx.post(f"{shared_server.url}/v1/completions", json=body), param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", RAW)
def test_broken_body_is_a_400_on_every_route(shared_server: Served, path: str, body: bytes) -> None:
    answer = httpx.post(shared_server.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**80]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_bad_tokenizer_request_says_which_field_and_why(
    shared_server: Served, path: str, body: dict[str, Any], param: str
) -> None:
    check_error(httpx.post(shared_server.url + path, json=body), param)


def test_health_version_and_metrics_tell_what_is_going_on(shared_server: Served) -> None:
    with httpx.Client(base_url=shared_server.url) as http:
        assert http.get("/health/live").json() == {"status": "live"}
        assert http.get("/health/ready").status_code == http.get("/health").status_code == 200
        assert "version" in http.get("/version").json()
        before = http.get("/health/progress").json()
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20})
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})
        text = http.get("/metrics").text
    assert before["worker"] == "ready"
    for name in (
        "kilat_time_to_first_token_seconds_count",
        "kilat_requests_open",
        "kilat_sessions_running",
        "process_open_fds",
    ):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert 'kilat_requests_total{method="POST",route="/v1/completions",status="400"}' in text


def test_step_counter_of_progress_grows_with_work(shared_server: Served) -> None:
    with httpx.Client(base_url=shared_server.url) as http:
        before = http.get("/health/progress").json()["step"]
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20})
        eventually(
            lambda: http.get("/health/progress").json()["step"] >= before + 20, "the step counter grew by 20"
        )
