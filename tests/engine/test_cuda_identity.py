"""Token identity on a CUDA device with the exact kernels: alone = batched = chunked = cached = preempted = forked, graphs or not."""

import pytest
import torch

from kilat.base import metrics
from kilat.base.hashing import branch_seed
from kilat.ops.kernels import triton_set
from kilat.wire.sampling import Grammar
from tests.engine.harness import make_engine, record, run, tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    wide = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 512}
    return tiny_model(
        "llama", triton_set("test", exact=True), device=torch.device("cuda"), dtype=torch.bfloat16, **wide
    )


def engine_of(model, **options):
    return make_engine(model, page_tokens=16, runner="device", **options)


def jobs():
    out = []
    for i in range(10):
        prompt = [(i % 3) * 31 + k * 7 % 256 for k in range((i % 3) * 33)] + [i, i + 1, i + 2]
        temperature = 0.0 if i % 2 else 0.9
        params = {
            "temperature": temperature,
            "seed": i,
            "max_tokens": 24,
            "ignore_eos": True,
            "top_k": 20 * (i % 2),
        }
        out.append(record(f"s{i}", [t % 256 for t in prompt], **params))
    return out


@pytest.fixture(scope="module")
def alone(model):
    result = {}
    for job in jobs():
        engine = engine_of(model, cache=False, step_tokens=256)
        result |= run(engine, [job])
        engine.close()
    return result


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("step_tokens", "n_pages"), [(256, 64), (16, 64), (40, 12)])
def test_batched_chunked_cached_and_preempted_equal_alone(model, alone, depth, step_tokens, n_pages):
    engine = engine_of(model, depth=depth, step_tokens=step_tokens, n_pages=n_pages, seqs=10)
    assert run(engine, jobs()) == alone
    # the second round hits the cache and replays graphs that the first one captured
    assert run(engine, jobs()) == alone
    if step_tokens == 256:
        assert engine.counters()[metrics.PREFIX_HIT_TOKENS] > 0
        assert engine.runner.graphs.captured
    engine.close()


def test_samples_of_one_prompt_equal_single_requests_with_their_seeds(model):
    engine = engine_of(model, depth=2)
    together = run(engine, [record("s", list(range(40)), n=4, temperature=1.0, seed=9)])
    for k, name in enumerate(["s", "s#1", "s#2", "s#3"]):
        single = run(
            engine_of(model), [record("x", list(range(40)), temperature=1.0, seed=branch_seed(9, k))]
        )
        assert together[name] == single["x"]
    engine.close()


def test_constrained_and_reported_rows_equal_alone_beside_plain_ones(model):
    mixed = [
        record("regex", [4, 5], grammar=Grammar("regex", "[a-f]{6}"), temperature=1.0, max_tokens=30),
        record("told", [4, 6], logprobs=2, max_tokens=10, ignore_eos=True),
        record("plain", [6, 7, 8], max_tokens=30, ignore_eos=True),
    ]
    single = {}
    for job in mixed:
        single |= run(engine_of(model, grammar=True), [job])
    engine = engine_of(model, grammar=True, depth=2)
    assert run(engine, mixed) == single
    engine.close()
