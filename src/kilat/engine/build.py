"""Builds an engine: config and weights in, a running :class:`Engine` out. The only place where all rooms meet."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kilat.base.errors import ConfigError
from kilat.engine.compile_ahead import CompileAhead
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine, EngineInfo
from kilat.engine.device_runner import DeviceLimits, DeviceRunner
from kilat.engine.grammar import GrammarCompiler
from kilat.engine.graphs import TOKEN_MULTIPLE
from kilat.engine.kv_memory import Ledger, PageMemory, choose_pages, free_bytes, page_layout
from kilat.engine.kv_scales import measured_scales, require_fp8_kv, scales_name, stored_scales
from kilat.engine.runner import HostRunner, MatcherOf, Runner
from kilat.engine.sampler import Sampler
from kilat.engine.work import model_work
from kilat.load.config import read_config as read_raw_config
from kilat.load.config import read_generation
from kilat.load.sources import ModelFiles
from kilat.load.weights import open_weights
from kilat.models.registry import read_config
from kilat.nn.build import Build, DummyBuild, NoWeights
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.ops import kernels
from kilat.ops.cpu import kernels as cpu_kernels
from kilat.ops.fp8_linear import FP8
from kilat.ops.kernels import BlockOps, Kernels
from kilat.parallel.mesh import Mesh
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.scheduler import Scheduler
from kilat.quant.fp8_blocks import checkpoint_quant
from kilat.wire.kv import KvLayout

DEFAULT_STEP_TOKENS = 2048
DEFAULT_MAX_MODEL_LEN = 32_768
OnWeight = Callable[[str, int], None]


def _is_shared(config: EngineConfig, device: torch.device) -> bool:
    """Pages on a device need no memory file: other processes map them through the device."""
    return config.shared_pool and device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the config leaves open, decided for this machine and model."""

    device: torch.device
    kernels: Kernels
    dtype: torch.dtype
    max_model_len: int
    depth: int
    target_step_s: float
    fp8: bool
    kv_fp8: bool
    blocks: BlockOps | None


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
    model, note = _load_model(files, config, decoder, choices, ledger, on_weight)
    name = _pages_name(config, choices, model)
    layout = kv_layout(decoder, config.page_tokens, FP8 if choices.kv_fp8 else choices.dtype, name)
    n_pages = choose_pages(
        layout,
        asked_bytes=config.kv_cache_bytes,
        free_bytes=free_bytes(choices.device, config.memory_share),
        sessions=config.max_num_seqs,
        max_model_len=choices.max_model_len,
    )
    pages = PageMemory(layout, n_pages, choices.device, shared=_is_shared(config, choices.device))
    ledger.add("pages", pages.n_bytes)
    grammars = (
        GrammarCompiler(tokenizer_json, decoder.vocab_size, generation.eos_ids) if tokenizer_json else None
    )
    sampler = Sampler(choices.kernels, generation.eos_ids)
    runner = _runner(config, choices, model, pages, sampler, grammars.ready if grammars else None)
    info = EngineInfo(
        model_id=config.model_id,
        max_model_len=choices.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=decoder.vocab_size,
        page_tokens=config.page_tokens,
        n_pages=n_pages,
        eos_ids=generation.eos_ids,
        dtype=str(choices.dtype).removeprefix("torch."),
        kernels=f"{choices.kernels.name}: {choices.kernels.why}{note}",
        ledger_bytes=ledger.owners,
        work=model_work(model, layout),
    )
    scheduler = Scheduler(_limits(config, choices, n_pages), model_id=name, eos_ids=generation.eos_ids)
    return Engine(info, scheduler, runner, pages, grammars, depth=choices.depth)


def _runner(
    config: EngineConfig,
    choices: _Choices,
    model: Decoder,
    pages: PageMemory,
    sampler: Sampler,
    matcher_of: MatcherOf | None,
) -> Runner:
    if choices.device.type != "cuda":
        return HostRunner(model, pages.kv, config.page_tokens, sampler, matcher_of, choices.depth)
    limits = device_limits(config, choices.max_model_len, pages.n_pages)
    ahead = CompileAhead(config) if choices.kernels.name.startswith("triton") else None
    return DeviceRunner(model, pages.kv, limits, sampler, matcher_of, ahead)


def device_limits(config: EngineConfig, max_model_len: int, scratch_page: int) -> DeviceLimits:
    """What a device's runner of this config is made for."""
    return DeviceLimits(
        config.page_tokens, config.max_num_seqs, step_tokens(config), max_model_len, scratch_page
    )


def _choose(config: EngineConfig, raw: Mapping[str, object], decoder: DecoderConfig) -> _Choices:
    threads = config.threads or len(os.sched_getaffinity(0))
    device = choose_device(config.device)
    chosen = choose_kernels(config.kernels, device, threads, exact=config.deterministic)
    # the native set has threads of its own; between its ops torch does little, and OpenMP barriers on busy cores cost milliseconds
    torch.set_num_threads(threads if chosen.name == "torch-reference" else 1)
    if config.kv_dtype == "fp8":
        require_fp8_kv(chosen, decoder)
    dtype = choose_dtype(config.dtype, raw)
    return _Choices(
        device,
        chosen,
        dtype,
        choose_max_model_len(config.max_model_len, decoder.max_positions),
        config.depth or (2 if device.type == "cuda" else 1),
        (0.02 if device.type == "cuda" else 0.2) if config.target_step_s is None else config.target_step_s,
        choose_fp8(config.quant, raw),
        config.kv_dtype == "fp8",
        chosen.blocks if keeps_blocks(config.quant, chosen, dtype) else None,
    )


def _pages_name(config: EngineConfig, choices: _Choices, model: Decoder) -> str:
    """What pages are of. Those of other weights, kernels, number formats or sizes hold other bits: they must not share a name."""
    scales = [layer.attention.kv_scale for layer in model.layers]
    kv = scales_name([s for s in scales if s is not None]) if choices.kv_fp8 else choices.dtype
    weights = "fp8" if choices.fp8 else "blocks" if _keeps_blocks(config, choices) else choices.dtype
    return f"{config.model_id}/{weights}/{choices.dtype}/{choices.kernels.name}/{kv}/{config.page_tokens}"


def _keeps_blocks(config: EngineConfig, choices: _Choices) -> bool:
    return config.model_kind == "gguf" and choices.blocks is not None and not config.dummy_weights


def _limits(config: EngineConfig, choices: _Choices, n_pages: int) -> SchedulerConfig:
    return SchedulerConfig(
        n_pages=n_pages,
        page_tokens=config.page_tokens,
        max_model_len=choices.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=step_tokens(config),
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        depth=choices.depth,
        target_step_s=choices.target_step_s,
        token_multiple=TOKEN_MULTIPLE if choices.device.type == "cuda" else 1,
    )


def step_tokens(config: EngineConfig) -> int:
    """Tokens of one forward pass over all rows."""
    return config.max_step_tokens or max(DEFAULT_STEP_TOKENS, config.max_num_seqs)


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


def choose_fp8(asked: str, raw: Mapping[str, object]) -> bool:
    """Whether the linear weights of layers are FP8 blocks; ``auto``: when the checkpoint's are."""
    return (checkpoint_quant(raw) if asked == "auto" else asked) == "fp8"


def keeps_blocks(asked: str, chosen: Kernels, dtype: torch.dtype) -> bool:
    """Whether matrices that are stored in GGUF's blocks stay in them; their products take and give bf16."""
    return asked == "auto" and chosen.blocks is not None and dtype == torch.bfloat16


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
) -> tuple[Decoder, str]:
    """The model, ready to run over pages of the chosen format, and what to say about how its weights were stored."""

    def count(name: str, n_bytes: int) -> None:
        ledger.add("weights", n_bytes)
        on_weight(name, n_bytes)

    mesh, requantized = Mesh(), list[str]()
    common = (mesh, choices.kernels, choices.dtype, choices.device, count, choices.fp8)
    if config.dummy_weights:
        model = Decoder(DummyBuild(NoWeights(), *common), decoder, choices.max_model_len)
        scales = None
    else:
        with open_weights(files) as weights:
            build = Build(weights, *common, requantized.append, choices.blocks)
            model = Decoder(build, decoder, choices.max_model_len)
            scales = stored_scales(weights, decoder, mesh, choices.device) if choices.kv_fp8 else None
    if choices.kv_fp8:
        model.scale_kv(scales or measured_scales(model, config.page_tokens))
    note = "; matrices stay in the file's blocks" if _keeps_blocks(config, choices) else ""
    return model, note + _note(choices, len(requantized))


def _note(choices: _Choices, n_requantized: int) -> str:
    parts = []
    if choices.fp8:
        parts.append("FP8 weights")
    if choices.fp8 and choices.kernels.pack_fp8 is None:
        parts[-1] += f" dequantized to {choices.dtype} while loading, since this set has no FP8 product"
    if n_requantized:
        parts.append(
            f"{n_requantized} weights quantized anew, since their blocks end inside what is fused or shared"
        )
    if choices.kv_fp8:
        parts.append("FP8 pages")
    return "".join(f"; {part}" for part in parts)
