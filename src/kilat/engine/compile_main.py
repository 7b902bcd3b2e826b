"""python -m kilat.engine.compile_main CONFIG INDEX COUNT: one of the processes of compile_ahead, on its share of the shapes."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from kilat.engine.build import choose_dtype, choose_fp8, choose_max_model_len, device_limits, kv_layout
from kilat.engine.config import EngineConfig
from kilat.engine.device_runner import DeviceRunner
from kilat.engine.graphs import Shape, likely_shapes
from kilat.engine.kv_memory import PageMemory
from kilat.engine.sampler import Sampler
from kilat.load.config import read_config as read_raw_config
from kilat.load.sources import ModelFiles
from kilat.models.registry import read_config
from kilat.nn.build import DummyBuild, NoWeights
from kilat.nn.decoder import Decoder
from kilat.ops.fp8_linear import FP8
from kilat.ops.kernels import Kernels, compiling_triton_set
from kilat.ops.rope_write import KvScale
from kilat.parallel.mesh import Mesh

META = torch.device("meta")
NICENESS = 10


def share(shapes: Iterable[Shape], index: int, count: int) -> list[Shape]:
    """Every ``count``-th group of shapes from ``index`` on. Shapes of one group need mostly the same kernels: decode steps or others, with
    rows up to one power of two. Groups keep the order of their first shape."""
    groups: dict[tuple[bool, int], list[Shape]] = {}
    for s in shapes:
        groups.setdefault((s.max_q_len == 1, (s.rows - 1).bit_length()), []).append(s)
    return [s for group in list(groups.values())[index::count] for s in group]


def meta_runner(config: EngineConfig, kernels: Kernels) -> DeviceRunner:
    """A runner like the engine's for ``config`` on the meta device, with one layer of each kind and a last one, which may need other kernels."""
    files = ModelFiles(kind=config.model_kind, path=Path(config.model_path), name=config.model_id)  # type: ignore[arg-type]
    raw = read_raw_config(files)
    decoder = read_config(raw)
    decoder = replace(decoder, attention=(*dict.fromkeys(decoder.attention), decoder.attention[-1]))
    dtype = choose_dtype(config.dtype, raw)
    length = choose_max_model_len(config.max_model_len, decoder.max_positions)
    build = DummyBuild(
        NoWeights(), Mesh(), kernels, dtype, META, lambda *_: None, choose_fp8(config.quant, raw)
    )
    model = Decoder(build, decoder, length)
    kv_fp8 = config.kv_dtype == "fp8"
    layout = kv_layout(decoder, config.page_tokens, FP8 if kv_fp8 else dtype, "")
    if kv_fp8:
        one = torch.ones(decoder.attention[0].n_kv, device=META)
        model.scale_kv([KvScale(one, one)] * len(decoder.attention))
    pages = PageMemory(layout, 1, META)
    limits = device_limits(config, length, pages.n_pages)
    return DeviceRunner(model, pages.kv, limits, Sampler(kernels, ()), None)


def main() -> None:
    os.nice(NICENESS)
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    index, count = int(sys.argv[2]), int(sys.argv[3])
    runner = meta_runner(config, compiling_triton_set(exact=config.deterministic))
    limits, parent = runner.limits, os.getppid()
    shapes = likely_shapes(limits.max_rows, limits.max_tokens, limits.max_model_len)
    for shape in share(shapes, index, count):
        if os.getppid() != parent:
            break
        runner.compute(shape)


if __name__ == "__main__":
    main()
