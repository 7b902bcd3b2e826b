"""`kilat up` and `kilat down`: what their file may hold, and a deployment that outlives the command."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kilat.base.errors import ConfigError
from kilat.cli.deployment import read_deployment, serve_argv
from kilat.cli.main import build_parser, main
from tests.cli.test_child_server import wait_gone
from tests.cli.whole_model import write_model

pytestmark = pytest.mark.cluster

FULL = """
model: smollm2
name: chat
served_model_name: small
workers: {both: 1, prefill: 2, decode: 3, most: 9}
resources: {cpus: 4, gpus: 1}
slo: {ttft_ms: 500, tpot_ms: 50}
ray: {address: "10.0.0.1:6379", control_host: 10.0.0.1}
listen: {host: 0.0.0.0, port: 80, api_key_file: keys}
engine: {max-model-len: 4096, enable-prefix-caching: false, quant: fp8}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_file_stands_for_a_serve_command(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("kl_me_12345678\n")
    deployment = read_deployment(written(tmp_path, FULL))
    assert deployment.name == "chat"
    args = build_parser().parse_args(["serve", *serve_argv(deployment, tmp_path)])
    assert (args.model, args.served_model_name, args.workers, args.prefill, args.decode) == (
        "smollm2",
        "small",
        1,
        2,
        3,
    )
    assert (args.ray, args.control_host, args.worker_cpus, args.worker_gpus) == (
        "10.0.0.1:6379",
        "10.0.0.1",
        4,
        1,
    )
    assert args.max_workers == 9
    assert (args.ttft_slo, args.tpot_slo, args.host, args.port) == (500, 50, "0.0.0.0", 80)
    assert args.api_key_file == tmp_path / "keys"
    assert (args.max_model_len, args.prefix_cache, args.quant) == (4096, False, "fp8")


def test_model_is_enough_and_the_file_gives_the_name(tmp_path: Path) -> None:
    deployment = read_deployment(written(tmp_path, "model: smollm2"))
    args = build_parser().parse_args(["serve", *serve_argv(deployment, tmp_path)])
    assert (deployment.name, args.workers, args.ray, args.port) == ("cluster", 1, None, 8000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers: {both: 2}", "missing required field `model`"),
        ("model: m\nworker: {both: 2}", "unknown field `worker`"),
        ("model: m\nworkers: {both: many}", r"Expected `int`, got `str` - at `\$.workers.both`"),
        ("model: m\nslo: {ttft_ms: 5}", "tpot_ms"),
        ("model: m\nresources: {gpus: 1}", "counted by Ray only"),
        ("model: m\nname: ../up", "name is '../up'"),
        ("model: m\nengine: {--threads: 2}", "without their dashes"),
        ("model: [", "cluster.yaml"),
    ],
)
def test_wrong_file_is_refused_with_the_field(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read_deployment(written(tmp_path, text))
    assert "\n" not in error.value.message


def kilat(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kilat.cli", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "KILAT_CACHE_DIR": str(folder)},
    )


def test_deployment_serves_after_the_command_until_it_is_taken_down(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model")
    engine = "engine: {kernels: reference, threads: 1, kv-cache-memory-bytes: 8MiB}"
    file = written(tmp_path, f"model: {model}\nlisten: {{port: 0}}\n{engine}\n")
    assert "is not up" in kilat(tmp_path, "down", str(file)).stdout
    up = kilat(tmp_path, "up", str(file))
    try:
        assert up.returncode == 0, up.stderr
        found = re.search(r"ready: \S+ at (http://\S+)/v1", up.stdout)
        assert found and httpx.get(f"{found[1]}/health/ready").status_code == 200
        again = kilat(tmp_path, "up", str(file))
        assert again.returncode == 2 and "is up" in again.stderr
        pid = int(re.findall(r"process (\d+)", again.stderr)[0])
    finally:
        down = kilat(tmp_path, "down", str(file))
    assert (down.returncode, down.stdout) == (0, "cluster is down\n")
    wait_gone(pid)
    wrong = kilat(tmp_path, "up", str(written(tmp_path, "model: m\nengine: {max-num-seqs: 0}")))
    assert wrong.returncode == 2 and "--max-num-seqs" in wrong.stderr
    broken = kilat(tmp_path, "up", str(written(tmp_path, f"model: {model}\nengine: {{kernels: none}}")))
    assert broken.returncode == 1 and "ended with status" in broken.stderr
    assert not list((tmp_path / "deployments").glob("*.json"))


def test_process_that_was_killed_is_not_up(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    engine = "engine: {kernels: reference, threads: 1, kv-cache-memory-bytes: 8MiB}"
    file = written(tmp_path, f"model: {write_model(tmp_path / 'model')}\nlisten: {{port: 0}}\n{engine}\n")
    assert kilat(tmp_path, "up", str(file)).returncode == 0
    pid = int(re.findall(r"process (\d+)", kilat(tmp_path, "up", str(file)).stderr)[0])
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert "is not up" in kilat(tmp_path, "down", str(file)).stdout


def test_options_for_ray_need_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--worker-gpus", "1"]) == 2
    assert "without --ray" in capsys.readouterr().err
    assert main(["serve", "m", "--ray", "nowhere"]) == 2
    assert "give HOST:PORT, or auto" in capsys.readouterr().err
