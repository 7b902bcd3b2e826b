"""The same checkpoint in the engine and in the runtime, both on the CPU kernels."""

from pathlib import Path

import numpy as np
import torch

from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.native.runtime import NativeModel, NativeSession, Sampling
from kilat.ops.batch import StepBatch
from tests.engine.harness import record, run

CONTEXT = 128
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def engine_of(path: Path, dtype: str, *, stored: bool = False) -> Engine:
    """``stored``: block formats stay as they are."""
    kind = "hf" if path.is_dir() else "gguf"
    return build_engine(
        EngineConfig(
            str(path),
            kind,
            "twin",
            dtype=dtype,
            max_model_len=CONTEXT,
            max_num_seqs=4,
            kv_cache_bytes=64 << 20,
            kernels="cpu",
            threads=2,
            quant="auto" if stored else "none",
        )
    )


def engine_ids(engine: Engine, prompts: list[list[int]], n: int, **params) -> list[list[int]]:
    """``n`` ids after each prompt, all in one batch."""
    records = [
        record(f"s{i}", prompt, max_tokens=n, ignore_eos=True, **params) for i, prompt in enumerate(prompts)
    ]
    found = run(engine, records)
    return [found[f"s{i}"] for i in range(len(prompts))]


def native_ids(session: NativeSession, prompt: list[int], n: int, sampling: Sampling) -> list[int]:
    """The same from one session, which is emptied first."""
    session.rewind(0)
    ids = [session.prefill(prompt, sampling)]
    while len(ids) < n:
        ids.append(session.step(ids[-1], sampling))
    return ids


def native_of(path: Path, dtype: str, *, stored: bool = False, threads: int = 2) -> NativeModel:
    return NativeModel(path, dtype=dtype, threads=threads, weights="stored" if stored else "wide")


def engine_streams(engine: Engine, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(what enters each layer and what leaves the last one [layers + 1, hidden], logits [vocab]) of the prompt's last token, from the
    engine's own model, run outside of its scheduler."""
    model = engine.runner.model
    streams: list[torch.Tensor] = []
    n, tokens = len(prompt), engine.runner.page_tokens
    pages = -(-n // tokens)
    table = torch.arange(pages, dtype=torch.int32)[None]
    batch = StepBatch(
        token_ids=torch.tensor(prompt, dtype=torch.int32),
        positions=torch.arange(n, dtype=torch.int32),
        slots=torch.arange(n, dtype=torch.int32),
        row_start=torch.tensor([0, n], dtype=torch.int32),
        kv_len=torch.tensor([n], dtype=torch.int32),
        page_table=table,
        logits_at=torch.tensor([n - 1]),
        page_tokens=tokens,
        max_kv_len=n,
        max_q_len=n,
    )
    plain = model.kernels
    layers = model.layers
    with torch.inference_mode():
        residual = model.embedding(batch.token_ids)
        x = layers[0].enter(residual)
        for i, layer in enumerate(layers):
            streams.append(residual[-1].clone())  # the layer updates its residual in place
            x, residual = layer(x, residual, model.cos_sin, engine.runner.kv[:, i], batch)
            if layer is not layers[-1]:
                x, residual = layers[i + 1].follow(layer, x, residual)
        x = layers[-1].mlp.down(x)[-1:]
        y, stream = plain.add_rms_norm(x, residual[-1:].clone(), model.norm, model.config.norm_eps)
        streams.append(stream[0])
        logits = plain.linear(y, model.head)[0]
    return torch.stack(streams).float().numpy(), logits.float().numpy()
