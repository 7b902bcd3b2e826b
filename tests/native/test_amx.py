"""The runtime and the engine on AMX's tiles, with a model of the instructions: the same bits in both."""

import numpy as np
import pytest
import torch

from kilat.native import build as building
from kilat.native.runtime import NativeModel, Sampling
from kilat.ops.cpu import kernels as cpu
from kilat.ops.cpu.library import load
from tests.native import checkpoints, twins
from tests.ops.cpu import amx

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("runtime")]
PROMPT, N = list(range(1, 70)), 12


def test_ids_layers_and_logits_are_the_engines(tmp_path, monkeypatch):
    if load().kilat_cpu_best_isa() < amx.AVX512_BF16:
        pytest.skip("this processor does not have the instructions beside which tiles are used")
    checkpoints.save("qwen3", tmp_path, torch.bfloat16)
    monkeypatch.setattr(cpu, "load", amx.model_library)
    engine = twins.engine_of(tmp_path, "bfloat16")
    streams, logits = twins.engine_streams(engine, PROMPT)
    monkeypatch.setattr(building, "cpu_units", amx.model_units)
    with NativeModel(tmp_path, dtype="bfloat16", threads=2, library=building.build()) as native:
        assert native.info.kernels == "cpu-amx"
        with native.session(twins.CONTEXT, keep_layers=True) as session:
            session.prefill(PROMPT)
            np.testing.assert_array_equal(session.layers(), streams)
            np.testing.assert_array_equal(session.logits(), logits)
            assert (
                twins.native_ids(session, PROMPT, N, Sampling()) == twins.engine_ids(engine, [PROMPT], N)[0]
            )
