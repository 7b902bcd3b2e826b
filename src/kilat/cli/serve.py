"""`kilat serve MODEL`: resolve the model, then hand over to cluster/launch."""

import argparse
import shutil
import tempfile
from pathlib import Path

from kilat.base import log
from kilat.base.env import cache_dir, cuda_devices
from kilat.base.errors import ConfigError
from kilat.cli.fetch import fetch
from kilat.cli.kernels import prepare
from kilat.cli.options import engine_options, read_keys
from kilat.cluster.config import RayConfig, ServeConfig, check
from kilat.cluster.launch import serve
from kilat.engine.config import EngineConfig
from kilat.load.config import read_generation
from kilat.load.files import ModelFiles
from kilat.policy.scale.config import BESIDE


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status of the deployment."""
    log.setup("serve")
    # a wrong option must not cost a download
    config = _config(args, ModelFiles("hf", Path(args.model), args.model))
    check(config)
    if config.ray is None:  # with Ray others' machines count
        _check_machine(args, config)
    files = fetch(args.model)
    _check_length(args.max_model_len, files)
    if config.ray is None:
        prepare(args, log.get_logger("serve").warning)
    return serve(_config(args, files))


def _check_machine(args: argparse.Namespace, config: ServeConfig) -> None:
    """Raise ConfigError for what this machine has not, before anything is loaded."""
    if config.host_cache_gb and args.device == "cpu":
        raise ConfigError(
            f"--host-cache-gb is {config.host_cache_gb:g}, but with --device cpu pages are in the host's memory already: "
            "use a larger --kv-cache-memory-bytes, or --disk-cache-gb"
        )
    if not config.disk_cache_gb:
        return
    folder = Path(config.disk_cache_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        held = sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())
        room_gb = (shutil.disk_usage(folder).free + held) / 1e9
    except OSError as e:
        raise ConfigError(
            f"the folder {folder} cannot be written ({e.strerror}): name another with --disk-cache-dir"
        ) from e
    if config.disk_cache_gb > room_gb:
        raise ConfigError(
            f"--disk-cache-gb is {config.disk_cache_gb:g}, the disk of {folder} has room for {room_gb:.1f}: ask for less, or name "
            "another folder with --disk-cache-dir"
        )


def _check_length(asked: int | None, files: ModelFiles) -> None:
    """Raise ConfigError for a context that the model does not have."""
    if asked is not None and asked > (most := read_generation(files).max_model_len):
        raise ConfigError(
            f"--max-model-len is {asked:,}, the model was trained for {most:,} positions: use that or less"
        )


def _config(args: argparse.Namespace, files: ModelFiles) -> ServeConfig:
    name = args.served_model_name or files.name
    workers = args.workers
    if workers is None:
        workers = 0 if args.prefill or args.decode else 1
    n_workers = max(workers + args.prefill + args.decode, args.max_workers)
    # Workers take the CUDA devices in turn; without any they share the host's memory. With Ray each has devices of its own.
    n_devices = 1 if args.device == "cpu" else max(len(cuda_devices()), 1)
    if args.worker_gpus:
        n_devices = max(n_devices, round(n_workers * args.worker_gpus))
    ray, options = _ray(args), engine_options(args)
    if ray is not None:
        options.setdefault(
            "threads", max(round(ray.cpus), 1)
        )  # Ray counts processors, and binds nobody to them
    if args.tpot_slo is not None and args.tpot_slo > 0:
        # a chunk of a prompt may not take those that decode beside it over their target
        options.setdefault("target_step_s", BESIDE * args.tpot_slo / 1e3)
    engine = EngineConfig(
        model_path=str(files.path),
        model_kind=files.kind,
        model_id=name,
        shared_pool=n_workers > 1,
        memory_share=1 / max(-(-n_workers // n_devices), 1),
        **options,
    )
    return ServeConfig(
        ray=ray,
        files=files,
        engine=engine,
        served_model_name=name,
        workers=workers,
        prefill=args.prefill,
        decode=args.decode,
        max_workers=args.max_workers,
        ttft_slo_s=args.ttft_slo / 1e3 if args.ttft_slo is not None else None,
        tpot_slo_s=args.tpot_slo / 1e3 if args.tpot_slo is not None else None,
        host_cache_gb=args.host_cache_gb,
        disk_cache_gb=args.disk_cache_gb,
        disk_cache_dir=args.disk_cache_dir or str(cache_dir() / "pages"),
        host=args.host,
        port=args.port,
        api_keys=read_keys(args.api_key, args.api_key_file),
        drain_s=args.drain_timeout,
        stop_at_stdin_end=args.stop_at_stdin_end,
    )


def _ray(args: argparse.Namespace) -> RayConfig | None:
    fields = {"cpus": args.worker_cpus, "gpus": args.worker_gpus, "control_host": args.control_host}
    given = {field: value for field, value in fields.items() if value is not None}
    if args.ray is not None:
        return RayConfig(address=args.ray, **given)
    if given:
        raise ConfigError(
            "got --control-host, --worker-cpus or --worker-gpus without --ray, which they are for"
        )
    return None
