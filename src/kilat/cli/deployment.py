"""The file of `kilat up`: one YAML document that says how a model is served, and the `kilat serve` command it stands for."""

import re
from pathlib import Path

import msgspec

from kilat.base.errors import ConfigError

MAX_FILE_BYTES = 256 * 1024


class Workers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers: ``both`` do prompts and answers, the others mainly one of them. ``most``: up to so many in all while the traffic
    needs them; 0: no more than these."""

    both: int = 0
    prefill: int = 0
    decode: int = 0
    most: int = 0


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker takes of its host; only Ray counts it."""

    cpus: float = 1.0
    gpus: float = 0.0


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets in milliseconds."""

    ttft_ms: float
    tpot_ms: float


class Ray(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where workers run, if not on this host."""

    address: str = "auto"
    control_host: str | None = None


class Listen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where clients connect. ``api_key_file`` is relative to the file that names it."""

    host: str | None = None
    port: int = 8000
    api_key_file: str | None = None


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it. ``name`` is the file's if it gives none; ``engine`` has engine flags without their dashes, ``max-model-len: 8192``."""

    model: str
    name: str = ""
    served_model_name: str | None = None
    workers: Workers = Workers(both=1)
    resources: Resources | None = None
    slo: Slo | None = None
    ray: Ray | None = None
    listen: Listen = Listen()
    engine: dict[str, str | int | float | bool] = {}


def read_deployment(path: Path) -> Deployment:
    """The checked file. Raises ConfigError that names the field."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {len(data):,} bytes, limit {MAX_FILE_BYTES:,}")
        found = msgspec.yaml.decode(data, type=Deployment)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        # YAML's own errors have several lines
        raise ConfigError(f"{path}: {' '.join(str(e).split())} (docs/deploy.md says what it may hold)") from e
    name = found.name or path.stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"{path}: name is {name!r}, allowed are letters, digits, and . _ - after the first")
    if found.resources is not None and found.ray is None:
        raise ConfigError(f"{path}: resources are counted by Ray only: add `ray: {{}}`, or leave them out")
    if bad := [flag for flag in found.engine if not re.fullmatch(r"[a-z][a-z-]*", flag)]:
        raise ConfigError(
            f"{path}: engine has {bad[0]!r}: write flags of `kilat serve` without their dashes in front"
        )
    return msgspec.structs.replace(found, name=name)


def serve_argv(d: Deployment, folder: Path) -> list[str]:
    """Arguments of ``kilat serve``. Paths are relative to ``folder``. The parser of that command checks what they hold."""
    argv = ["--port", str(d.listen.port)]
    argv += ["--workers", str(d.workers.both), "--prefill", str(d.workers.prefill)]
    argv += ["--decode", str(d.workers.decode), "--max-workers", str(d.workers.most)]
    given: list[tuple[str, object]] = [
        ("--served-model-name", d.served_model_name),
        ("--host", d.listen.host),
    ]
    if d.listen.api_key_file is not None:
        given.append(("--api-key-file", folder / d.listen.api_key_file))
    if d.slo is not None:
        given += [("--ttft-slo", d.slo.ttft_ms), ("--tpot-slo", d.slo.tpot_ms)]
    if d.ray is not None:
        resources = d.resources or Resources()
        given += [("--ray", d.ray.address), ("--control-host", d.ray.control_host)]
        given += [("--worker-cpus", resources.cpus), ("--worker-gpus", resources.gpus)]
    for flag, value in given:
        if value is not None:
            argv.append(f"{flag}={value}")
    for name, value in d.engine.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv.append(f"--{name}={value}")
    return [*argv, "--", d.model]
