"""What flags accept, and what the person reads when they do not."""

import argparse
import sys
from pathlib import Path

import pytest

from kilat.base.errors import ConfigError
from kilat.cli import options
from kilat.cli.main import build_parser, main

pytestmark = pytest.mark.logic


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2GB", 2 * 10**9),
        ("2G", 2 << 30),
        ("2g", 2 * 10**9),
        ("512 MiB", 512 << 20),
        ("64B", 64),
    ],
)
def test_amount_reads_units_as_vllm_does(text: str, value: int) -> None:
    assert options.amount(1, 1 << 40)(text) == value


@pytest.mark.parametrize(
    "text", ["", "K", "1.5", "-1", "1e9", "4 bananas", "0", "99999999999999", "0x10", "¼", "nan"]
)
def test_amount_refuses_what_is_no_whole_number_in_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="got"):
        options.amount(1, 1 << 30)(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://host/base/v1/", "https://host/base"),
    ],
)
def test_server_url_drops_the_v1_that_people_paste(text: str, value: str) -> None:
    assert options.server_url(text) == value


@pytest.mark.parametrize("text", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://a b"])
def test_server_url_refuses_what_is_no_http_address(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="http://HOST:PORT"):
        options.server_url(text)


def test_slo_reads_limits_and_refuses_unknown_names() -> None:
    assert options.slo("ttft=500,tpot=20.5") == {"ttft": 500.0, "tpot": 20.5}
    for bad in ("ttft", "speed=3", "ttft=fast", "ttft=-1", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="want ttft=MS"):
            options.slo(bad)


def test_engine_flags_reach_the_engine_under_its_own_names() -> None:
    args = build_parser().parse_args(
        "serve m --dtype float32 --max-model-len 4K --max-num-batched-tokens 512 --no-enable-prefix-caching "
        "--block-size 32 --quant fp8 --kv-cache-dtype fp8 "
        "--kv-cache-memory-bytes 1GiB --seed 7".split()
    )
    assert options.engine_options(args) == {
        "dtype": "float32",
        "max_model_len": 4096,
        "max_step_tokens": 512,
        "prefix_cache": False,
        "page_tokens": 32,
        "quant": "fp8",
        "kv_dtype": "fp8",
        "kv_cache_bytes": 1 << 30,
        "seed": 7,
    }


def test_flags_that_are_not_given_are_left_to_the_engine() -> None:
    args = build_parser().parse_args(["serve", "m"])
    assert options.engine_options(args) == {} and options.engine_argv(args) == []


def test_engine_flags_survive_the_way_to_a_child_process() -> None:
    given = build_parser().parse_args(
        "chat m --threads 2 --no-enable-prefix-caching --kv-cache-memory-bytes 64MiB --kernels reference".split()
    )
    child = build_parser().parse_args(["serve", "m", *options.engine_argv(given)])
    assert options.engine_options(child) == options.engine_options(given)
    assert options.engine_options(child)["prefix_cache"] is False


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("serve m --port 70000", "--port: got 70000, allowed 0 to 65535"),
        ("serve m --port http", "--port: got 'http', want a whole number"),
        ("serve m --dtype fp4", "--dtype: invalid choice: 'fp4'"),
        ("serve m --quant int4", "--quant: invalid choice: 'int4'"),
        ("serve m --max-num-seqs 0", "--max-num-seqs: got 0, allowed 1"),
        ("serve m --drain-timeout nan", "--drain-timeout: got nan, allowed 0"),
        ("serve m --api-key-file /nowhere", "--api-key-file: got '/nowhere', which is not a file"),
        ("serve", "MODEL"),
        ("serve m --workers 257", "--workers: got 257, allowed 0 to 256"),
        ("top --interval 0", "--interval: got 0, allowed 0.1"),
        ("drain", "WORKER"),
        ("cache", "VERB"),
        ("serve m --worker-gpus -1", "--worker-gpus: got -1, allowed 0"),
        ("up none.yaml", "got 'none.yaml', which is not a file"),
        ("serve m --prot 1", "did you mean --port?"),
        ("serve m --stop-at-stdin", "which is no option here"),
        ("srve m", "invalid choice: 'srve'"),
        ("run none.jsonl out.jsonl", "got 'none.jsonl', which is not a file"),
        ("run pyproject.toml /nowhere/out.jsonl --model m", "in a folder that exists"),
        ("bench serve m", "--rate --clients is required"),
        ("bench serve m --rate 1 --clients 1", "not allowed with argument --rate"),
        ("bench serve m --rate 0", "--rate: got 0, allowed 0.001"),
        ("bench latency m --input-len 1,x", "--input-len: got 'x'"),
        ("model", "VERB"),
    ],
)
def test_wrong_option_is_one_line_and_exit_status_2(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert says in err and err.startswith("kilat") and err.count("\n") == 1 and out == ""


def test_no_command_shows_the_commands_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in ("serve", "chat", "run", "bench", "model", "doctor"))


def test_hidden_flags_are_not_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = capsys.readouterr().out
    assert "--max-num-seqs" in out and "stdin" not in out


def test_error_of_a_command_is_one_line_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = type(sys)("kilat.cli.doctor")
    monkeypatch.setitem(sys.modules, "kilat.cli.doctor", command)
    for error, status in (
        (ConfigError("x is 1, allowed 2"), 2),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ):

        def fail(args: argparse.Namespace, error: BaseException = error) -> int:
            raise error

        command.run = fail  # type: ignore[attr-defined]
        assert main(["doctor"]) == status
    assert capsys.readouterr().err == "kilat doctor: x is 1, allowed 2\n"


def test_keys_come_from_flags_and_from_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkl_a_1\n\n  kl_b_2  \n")
    assert options.read_keys(["kl_c_3"], file) == ("kl_c_3", "kl_a_1", "kl_b_2")
    assert options.read_keys([], None) == ()
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        options.read_keys([], file)
    file.write_bytes(b"kl_a_1\n\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        options.read_keys([], file)
