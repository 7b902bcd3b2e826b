"""Settings of one engine."""

from dataclasses import dataclass

from kilat.base.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("auto", "reference", "cpu", "triton")
DEVICES = ("auto", "cpu", "cuda")
QUANTS = ("auto", "none", "fp8")
KV_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from; values of None are derived at start from the model and the machine.

    model_path      a Hugging Face directory or a .gguf file; ``model_kind`` is "hf" or "gguf"
    model_id        the name clients use
    dtype           of weights, activations and KV: auto is bfloat16 where the machine computes in it, else float32
    quant           of the linear weights: auto keeps the FP8 or GGUF blocks of the checkpoint (GGUF's where the kernel set has products with
                    them), none dequantizes them, fp8 quantizes those of the layers while loading
    kv_dtype        of the pages: auto is ``dtype``; fp8 halves them, with scales from the checkpoint or measured at start
    max_model_len   tokens of one session, prompt and output; None: what the model allows and memory holds
    max_num_seqs    sessions running at once
    max_step_tokens tokens of one forward pass over all rows
    kv_cache_bytes  memory of the page pool; None: a share of what is free, at most what the sessions can use
    memory_share    of the device's memory (of what is free of the host's): below 1 when engines share it
    page_tokens     tokens of a KV page
    threads         CPU threads; None: the cores this process may use
    kernels         auto, reference (torch, slow, any machine), cpu (native; an error where it cannot be built) or triton (CUDA)
    device          auto takes a CUDA device if there is one
    deterministic   batch-invariant kernels on every device (the CPU's always are)
    dummy_weights   random weights in the shapes of the config: for measurements without a checkpoint
    max_waiting     sessions that may queue before new ones are refused
    depth           steps in flight: 2 plans a step while the one before runs; None: 2 on CUDA, 1 on the CPU, where both share the cores
    shared_pool     keep the CPU's pages in a memory file that other processes of this host can map
    target_step_s   while sessions decode, a step's prefill share is what this leaves, so that a long prompt does not freeze them;
                    None: 0.02 on CUDA, 0.2 on the CPU
    """

    model_path: str
    model_kind: str
    model_id: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_step_tokens: int | None = None
    kv_cache_bytes: int | None = None
    page_tokens: int = 16
    prefix_cache: bool = True
    seed: int = 0
    threads: int | None = None
    kernels: str = "auto"
    max_waiting: int = 1024
    depth: int | None = None
    target_step_s: float | None = None
    device: str = "auto"
    deterministic: bool = False
    dummy_weights: bool = False
    quant: str = "auto"
    kv_dtype: str = "auto"
    shared_pool: bool = False
    memory_share: float = 1.0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kernels", self.kernels, KERNELS)
        _one_of("quant", self.quant, QUANTS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("model_kind", self.model_kind, ("hf", "gguf"))
        _between("max_num_seqs", self.max_num_seqs, 1, 4096)
        _between("page_tokens", self.page_tokens, 1, 1024)
        _one_of("device", self.device, DEVICES)
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share:g}, allowed above 0 to 1")
        if self.depth is not None:
            _between("depth", self.depth, 1, 2)
        _between("max_waiting", self.max_waiting, 0, 1_000_000)
        for name in ("max_model_len", "max_step_tokens", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, 1, 1 << 50)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(allowed)}")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value:,}, allowed {low:,} to {high:,}")
