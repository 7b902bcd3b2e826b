"""`kilat serve MODEL`: resolve the model, then hand over to cluster/launch."""

import argparse
from pathlib import Path

from kilat.base import log
from kilat.base.env import cache_dir, cuda_devices
from kilat.cli.fetch import fetch
from kilat.cli.options import engine_options, read_keys
from kilat.cluster.config import ServeConfig, check
from kilat.cluster.launch import serve
from kilat.engine.config import EngineConfig
from kilat.load.files import ModelFiles


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status of the deployment."""
    log.setup("serve")
    # a wrong option must not cost a download
    check(_config(args, ModelFiles("hf", Path(args.model), args.model)))
    return serve(_config(args, fetch(args.model)))


def _config(args: argparse.Namespace, files: ModelFiles) -> ServeConfig:
    name = args.served_model_name or files.name
    workers = args.workers
    if workers is None:
        workers = 0 if args.prefill or args.decode else 1
    n_workers = workers + args.prefill + args.decode
    # Workers take the CUDA devices in turn; without any they share the host's memory.
    n_devices = 1 if args.device == "cpu" else max(len(cuda_devices()), 1)
    engine = EngineConfig(
        model_path=str(files.path),
        model_kind=files.kind,
        model_id=name,
        shared_pool=n_workers > 1,
        memory_share=1 / max(-(-n_workers // n_devices), 1),
        **engine_options(args),
    )
    return ServeConfig(
        files=files,
        engine=engine,
        served_model_name=name,
        workers=workers,
        prefill=args.prefill,
        decode=args.decode,
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
