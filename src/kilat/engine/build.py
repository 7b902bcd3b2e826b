"""Builds an engine: config and weights in, a running :class:`Engine` out. The only place where all rooms meet."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kilat.base.errors import ConfigError
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine, EngineInfo
from kilat.engine.device_runner import DeviceLimits, DeviceRunner
from kilat.engine.grammar import GrammarCompiler
from kilat.engine.kv_memory import Ledger, PageMemory, choose_pages, free_bytes, page_layout
from kilat.engine.runner import HostRunner, Runner
from kilat.engine.sampler import Sampler
from kilat.load.config import read_config as read_raw_config
from kilat.load.config import read_generation
from kilat.load.sources import ModelFiles
from kilat.load.weights import open_weights
from kilat.models.registry import read_config
from kilat.nn.build import Build, DummyBuild, NoWeights
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.ops import kernels
from kilat.ops.cpu import kernels as cpu_kernels
from kilat.ops.kernels import Kernels
from kilat.parallel.mesh import Mesh
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.kv import KvLayout

DEFAULT_STEP_TOKENS = 2048
DEFAULT_MAX_MODEL_LEN = 32_768
OnWeight = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the config leaves open, decided for this machine and model."""

    device: torch.device
    kernels: Kernels
    dtype: torch.dtype
    max_model_len: int
    depth: int
    target_step_s: float


def build_engine(
    config: EngineConfig,
    *,
    tokenizer_json: str | None = None,
    on_weight: OnWeight = lambda name, n_bytes: None,
) -> Engine:
    """Load the model of ``config`` and make it ready to serve.

    ``tokenizer_json`` (the ``tokenizers`` library's JSON form) is needed for structured output only. ``on_weight`` hears every tensor
    taken, with its bytes (a progress bar). Raises ConfigError, ModelFileError.
    """
    files = ModelFiles(kind=config.model_kind, path=Path(config.model_path), name=config.model_id)  # type: ignore[arg-type]
    raw = read_raw_config(files)
    generation = read_generation(files)
    decoder = read_config(raw)
    choices = _choose(config, raw, decoder)
    ledger = Ledger()
    model = _load_model(files, config, decoder, choices, ledger, on_weight)
    # pages of another dtype, kernel set or page size hold other bits: they must not share a name
    name = f"{config.model_id}/{choices.dtype}/{choices.kernels.name}/{config.page_tokens}"
    layout = kv_layout(decoder, config.page_tokens, choices.dtype, name)
    n_pages = choose_pages(
        layout,
        asked_bytes=config.kv_cache_bytes,
        free_bytes=free_bytes(choices.device),
        sessions=config.max_num_seqs,
        max_model_len=choices.max_model_len,
    )
    # the page that no session owns: rows that only fill up a graph's bucket write there
    pages = PageMemory(layout, n_pages, choices.device, shared=config.shared_pool)
    ledger.add("pages", pages.n_bytes)
    grammars = (
        GrammarCompiler(tokenizer_json, decoder.vocab_size, generation.eos_ids) if tokenizer_json else None
    )
    sampler = Sampler(choices.kernels, generation.eos_ids)
    matcher_of = grammars.ready if grammars else None
    runner: Runner
    if choices.device.type == "cuda":
        limits = DeviceLimits(
            config.page_tokens, config.max_num_seqs, choices.max_model_len, scratch_page=n_pages
        )
        runner = DeviceRunner(model, pages.kv, limits, sampler, matcher_of)
    else:
        runner = HostRunner(model, pages.kv, config.page_tokens, sampler, matcher_of, choices.depth)
    info = EngineInfo(
        model_id=config.model_id,
        max_model_len=choices.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=decoder.vocab_size,
        page_tokens=config.page_tokens,
        n_pages=n_pages,
        eos_ids=generation.eos_ids,
        dtype=str(choices.dtype).removeprefix("torch."),
        kernels=f"{choices.kernels.name}: {choices.kernels.why}",
        ledger_bytes=ledger.owners,
    )
    scheduler = Scheduler(_limits(config, choices, n_pages), model_id=name, eos_ids=generation.eos_ids)
    return Engine(info, scheduler, runner, pages, grammars, depth=choices.depth)


def _choose(config: EngineConfig, raw: Mapping[str, object], decoder: DecoderConfig) -> _Choices:
    threads = config.threads or len(os.sched_getaffinity(0))
    device = choose_device(config.device)
    chosen = choose_kernels(config.kernels, device, threads, exact=config.deterministic)
    # the native set has threads of its own; between its ops torch does little, and OpenMP barriers on busy cores cost milliseconds
    torch.set_num_threads(threads if chosen.name == "torch-reference" else 1)
    return _Choices(
        device,
        chosen,
        choose_dtype(config.dtype, raw),
        choose_max_model_len(config.max_model_len, decoder.max_positions),
        config.depth or (2 if device.type == "cuda" else 1),
        (0.02 if device.type == "cuda" else 0.2) if config.target_step_s is None else config.target_step_s,
    )


def _limits(config: EngineConfig, choices: _Choices, n_pages: int) -> SchedulerConfig:
    return SchedulerConfig(
        n_pages=n_pages,
        page_tokens=config.page_tokens,
        max_model_len=choices.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens or max(DEFAULT_STEP_TOKENS, config.max_num_seqs),
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        depth=choices.depth,
        target_step_s=choices.target_step_s,
    )


def choose_device(asked: str) -> torch.device:
    """``auto`` is the CUDA device if torch sees one."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but torch sees none; use --device cpu or install a CUDA build of torch"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_kernels(asked: str, device: torch.device, threads: int, *, exact: bool = False) -> Kernels:
    """The kernel set: Triton's on CUDA; on the CPU the native set where it can be built, else the torch reference, with the reason."""
    if asked == "reference":
        return kernels.reference()
    if device.type == "cuda":
        if asked == "cpu":
            raise ConfigError("kernels is cpu, but the device is cuda; use --device cpu or other kernels")
        return kernels.triton_set(torch.cuda.get_device_name(device), exact=exact)
    if asked == "triton":
        raise ConfigError("kernels is triton, which needs a CUDA device; use --kernels auto")
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


def kv_layout(decoder: DecoderConfig, page_tokens: int, dtype: torch.dtype, model: str) -> KvLayout:
    """Layout of a page for this model; ``model`` is the name that page hashes start from."""
    a = decoder.attention[0]
    return page_layout(len(decoder.attention), page_tokens, a.n_kv, a.head_dim, dtype, model)


def _load_model(
    files: ModelFiles,
    config: EngineConfig,
    decoder: DecoderConfig,
    choices: _Choices,
    ledger: Ledger,
    on_weight: OnWeight,
) -> Decoder:
    def count(name: str, n_bytes: int) -> None:
        ledger.add("weights", n_bytes)
        on_weight(name, n_bytes)

    mesh = Mesh()
    if config.dummy_weights:
        dummy = DummyBuild(NoWeights(), mesh, choices.kernels, choices.dtype, choices.device, count)
        return Decoder(dummy, decoder, choices.max_model_len)
    with open_weights(files) as weights:
        build = Build(weights, mesh, choices.kernels, choices.dtype, choices.device, count)
        return Decoder(build, decoder, choices.max_model_len)
