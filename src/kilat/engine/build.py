"""Builds an engine: config and weights in, a running :class:`Engine` out. The only place where all rooms meet."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kilat.base.errors import ConfigError
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine, EngineInfo
from kilat.engine.grammar import GrammarCompiler
from kilat.engine.kv_memory import KvLayout, Ledger, allocate_pool, choose_pages
from kilat.engine.runner import Runner
from kilat.engine.sampler import Sampler
from kilat.load.config import read_config as read_raw_config
from kilat.load.config import read_generation
from kilat.load.sources import ModelFiles
from kilat.load.weights import open_weights
from kilat.models.registry import read_config
from kilat.nn.build import Build
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.ops import kernels
from kilat.ops.cpu import kernels as cpu_kernels
from kilat.ops.kernels import Kernels
from kilat.parallel.mesh import Mesh
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.scheduler import Scheduler

DEFAULT_STEP_TOKENS = 2048
DEFAULT_MAX_MODEL_LEN = 32_768


def build_engine(
    config: EngineConfig,
    *,
    tokenizer_json: str | None = None,
    on_weight: Callable[[str, int], None] = lambda name, n_bytes: None,
) -> Engine:
    """Load the model of ``config`` and make it ready to serve.

    ``tokenizer_json`` (the ``tokenizers`` library's JSON form) is needed for structured output only. ``on_weight`` hears every tensor
    taken, with its bytes (a progress bar). Raises ConfigError, ModelFileError.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    files = ModelFiles(kind=config.model_kind, path=Path(config.model_path), name=config.model_id)  # type: ignore[arg-type]
    raw = read_raw_config(files)
    generation = read_generation(files)
    chosen = choose_kernels(config.kernels, threads)
    # the native set has threads of its own; between its ops torch does little, and OpenMP barriers on busy cores cost milliseconds
    torch.set_num_threads(threads if chosen.name == "torch-reference" else 1)
    dtype = choose_dtype(config.dtype, raw)
    decoder = read_config(raw)
    max_model_len = choose_max_model_len(config.max_model_len, decoder.max_positions)
    ledger = Ledger()
    model = _load_model(files, decoder, chosen, dtype, max_model_len, ledger, on_weight)
    layout = kv_layout(decoder, config.page_tokens, dtype)
    n_pages = choose_pages(
        layout, asked_bytes=config.kv_cache_bytes, sessions=config.max_num_seqs, max_model_len=max_model_len
    )
    pool = allocate_pool(layout, n_pages, torch.device("cpu"))
    ledger.add("pages", n_pages * layout.page_bytes)
    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=n_pages,
            page_tokens=config.page_tokens,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens or max(DEFAULT_STEP_TOKENS, config.max_num_seqs),
            max_waiting=config.max_waiting,
            prefix_cache=config.prefix_cache,
            depth=config.depth,
            target_step_s=config.target_step_s,
        ),
        model_id=f"{config.model_id}/{dtype}/{chosen.name}/{config.page_tokens}",
        eos_ids=generation.eos_ids,
    )
    grammars = (
        GrammarCompiler(tokenizer_json, decoder.vocab_size, generation.eos_ids) if tokenizer_json else None
    )
    sampler = Sampler(chosen, generation.eos_ids)
    runner = Runner(model, pool, config.page_tokens, sampler, grammars.ready if grammars else None)
    info = EngineInfo(
        model_id=config.model_id,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=decoder.vocab_size,
        page_tokens=config.page_tokens,
        n_pages=n_pages,
        eos_ids=generation.eos_ids,
        dtype=str(dtype).removeprefix("torch."),
        kernels=f"{chosen.name}: {chosen.why}",
        ledger_bytes=ledger.owners,
    )
    return Engine(info, scheduler, runner, grammars, depth=config.depth)


def choose_kernels(asked: str, threads: int) -> Kernels:
    """The kernel set: ``auto`` is the native CPU set where it can be built, else the torch reference, with the reason."""
    if asked == "reference":
        return kernels.reference()
    usable, why = cpu_kernels.available()
    if usable:
        return cpu_kernels.cpu_kernels(threads, why)
    if asked == "cpu":
        raise ConfigError(
            f"the native CPU kernels cannot be used: {why}; install a C++ compiler or use --kernels reference"
        )
    return kernels.reference(why)


def choose_dtype(asked: str, raw: Mapping[str, object]) -> torch.dtype:
    """``auto``: float32 for a float32 checkpoint, else bfloat16 (half the bytes, and decode is bound by bytes)."""
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    return torch.float32 if stored == "float32" else torch.bfloat16


def choose_max_model_len(asked: int | None, positions: int) -> int:
    """``asked``, which must not exceed the model's ``positions``; without it the model's, at most 32,768."""
    if asked is None:
        return min(positions, DEFAULT_MAX_MODEL_LEN)
    if asked > positions:
        raise ConfigError(
            f"max_model_len is {asked:,}, the model was trained for {positions:,} positions; use that or less"
        )
    return asked


def kv_layout(decoder: DecoderConfig, page_tokens: int, dtype: torch.dtype) -> KvLayout:
    """Layout of a page for this model."""
    a = decoder.attention[0]
    return KvLayout(len(decoder.attention), page_tokens, a.n_kv, a.head_dim, dtype)


def _load_model(
    files: ModelFiles,
    decoder: DecoderConfig,
    chosen: Kernels,
    dtype: torch.dtype,
    max_model_len: int,
    ledger: Ledger,
    on_weight: Callable[[str, int], None],
) -> Decoder:
    def count(name: str, n_bytes: int) -> None:
        ledger.add("weights", n_bytes)
        on_weight(name, n_bytes)

    with open_weights(files) as weights:
        build = Build(weights, Mesh(), chosen, dtype, torch.device("cpu"), count)
        return Decoder(build, decoder, max_model_len)
