"""Predicts the memory that serving a model takes, by owner, from its headers and the engine's own choices.
Loads no weights.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from kilat.cli.machine import Machine
from kilat.engine.config import EngineConfig
from kilat.load.config import read_config as read_raw_config
from kilat.load.files import ModelFiles

if TYPE_CHECKING:
    from kilat.nn.decoder import DecoderConfig
    from kilat.ops.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Fit:
    """A prediction for ``device``. ``ledger_bytes`` by owner: weights, pages, workspace, and on the CPU the
    processes themselves. ``free_bytes`` of the device now. ``kv_tokens``: what all pages hold together.
    """

    device: str
    free_bytes: int
    dtype: str
    max_model_len: int
    kv_tokens: int
    kv_token_bytes: int
    ledger_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.ledger_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether everything together fits into what is free."""
        return self.total_bytes <= self.free_bytes


def predict(files: ModelFiles, settings: EngineConfig, chosen: "Kernels", machine: Machine) -> Fit:
    """The ledger of an engine with these settings. Raises ConfigError or ModelFileError when the engine could
    not be built.
    """
    import torch

    from kilat.engine.build import (
        choose_device,
        choose_dtype,
        choose_fp8,
        choose_max_model_len,
        keeps_blocks,
        kv_layout,
    )
    from kilat.engine.kv_memory import choose_pages, free_bytes
    from kilat.load.weights import open_weights
    from kilat.models.registry import read_config
    from kilat.ops.fp8_linear import FP8

    device = choose_device(settings.device)
    raw = read_raw_config(files)
    decoder = read_config(raw)
    dtype = choose_dtype(settings.dtype, raw)
    max_model_len = choose_max_model_len(settings.max_model_len, decoder.max_positions)
    layout = kv_layout(
        decoder, settings.page_tokens, FP8 if settings.kv_dtype == "fp8" else dtype, settings.model_id
    )
    n_pages = choose_pages(
        layout,
        asked_bytes=settings.kv_cache_bytes,
        free_bytes=free_bytes(device),
        sessions=settings.max_num_seqs,
        max_model_len=max_model_len,
    )
    with open_weights(files) as weights:
        shapes, stored_bytes = weights.shapes(), weights.total_bytes
    fp8 = choose_fp8(settings.quant, raw) and chosen.pack_fp8 is not None
    weight_bytes = sum(_kept_bytes(n, s, dtype.itemsize, fp8=fp8) for n, s in shapes.items())
    if decoder.tied and chosen.name.startswith("cpu"):
        # the output head is packed for the kernels, beside the table of the embedding
        weight_bytes += decoder.vocab_size * decoder.hidden * dtype.itemsize
    if files.kind == "gguf" and keeps_blocks(settings.quant, chosen, dtype):
        # matrices stay as they are stored, to a few percent, and a tied head is the embedding
        weight_bytes = min(weight_bytes, stored_bytes)
    ledger = {
        "weights": weight_bytes,
        "pages": (n_pages + 1) * layout.page_bytes,  # one takes the writes of padding rows
        "workspace": _workspace_bytes(decoder, settings, dtype.itemsize),
    }
    if device.type == "cpu":
        ledger["processes"] = _process_bytes()
    return Fit(
        device=device.type,
        free_bytes=machine.free_bytes if device.type == "cpu" else torch.cuda.mem_get_info(device)[0],
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        kv_tokens=n_pages * settings.page_tokens,
        kv_token_bytes=layout.page_bytes // settings.page_tokens,
        ledger_bytes=ledger,
    )


def _kept_bytes(name: str, shape: tuple[int, ...], itemsize: int, *, fp8: bool) -> int:
    """Bytes of a checkpoint's tensor once loaded."""
    from kilat.quant.fp8_blocks import BLOCK, SCALE_SUFFIX

    if name.endswith(SCALE_SUFFIX):
        return 0
    if fp8 and len(shape) == 2 and name.startswith("model.layers."):
        return math.prod(shape) + 4 * math.prod(-(-n // BLOCK) for n in shape)
    return math.prod(shape) * itemsize


def _workspace_bytes(decoder: "DecoderConfig", settings: EngineConfig, itemsize: int) -> int:
    """Activations that live at once in the widest layer of a full step, and the sampler's copies of the
    logits (fp32).
    """
    from kilat.engine.build import DEFAULT_STEP_TOKENS

    tokens = settings.max_step_tokens or max(DEFAULT_STEP_TOKENS, settings.max_num_seqs)
    a = decoder.attention[0]
    wide = max((a.n_q + 2 * a.n_kv) * a.head_dim + a.n_q * a.head_dim, 3 * decoder.inner)
    activations = tokens * (3 * decoder.hidden + wide) * itemsize
    logits = settings.max_num_seqs * decoder.vocab_size * (itemsize + 2 * 4)
    return activations + logits


def _process_bytes() -> int:
    """This process holds what a worker holds before it loads (Python, torch, kilat); the gateway is about a
    third of it.
    """
    rss: int = psutil.Process().memory_info().rss
    return rss + rss // 3
