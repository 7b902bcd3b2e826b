"""One engine in a process of its own, asked by bench_cpu_peers.py over its standard input: `PYTHON peer_engine.py ENGINE MODEL`.

A line is JSON ``[[ids, n], ...]``: continue each list of ids by exactly ``n`` greedy tokens, all at once. The answer is a line with
``{"s": seconds, "cpu_s": processor seconds of this process}``. It runs in the virtual environment of its engine, so it imports
nothing of kilat but for kilat's own engines. Prefix caches are off everywhere.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MAX_LEN = 8192
MAX_SEQS = 64
Ask = list[tuple[list[int], int]]
Run = Callable[[Ask], list[int]]


def kilat(model: str) -> Run:
    from kilat.llm import LLM
    from kilat.wire.sampling import SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=MAX_LEN, max_num_seqs=MAX_SEQS, prefix_cache=False)

    def run(asked: Ask) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in asked]
        done = llm.generate([ids for ids, _ in asked], params)
        return [len(d.samples[0].token_ids) for d in done]

    return run


def native(model: str) -> Run:
    from pathlib import Path

    from kilat.native.runtime import NativeModel, Sampling

    loaded = NativeModel(Path(model))
    session, greedy = loaded.session(MAX_LEN), Sampling()

    def one(ids: list[int], n: int) -> int:
        session.rewind(0)
        token = session.prefill(ids, greedy)
        for _ in range(n - 1):
            assert token is not None
            token = session.step(token, greedy)
        return n

    return lambda asked: [one(ids, n) for ids, n in asked]


def vllm(model: str) -> Run:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def run(asked: Ask) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in asked]
        prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
        return [len(d.outputs[0].token_ids) for d in llm.generate(prompts, params, use_tqdm=False)]

    return run


def openvino(model: str) -> Run:
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 3
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = MAX_SEQS
    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 2}
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def config(n: int) -> Any:
        found = genai.GenerationConfig()
        found.max_new_tokens = found.min_new_tokens = n
        found.ignore_eos, found.do_sample = True, False
        return found

    def run(asked: Ask) -> list[int]:
        ids = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in asked]
        done = pipe.generate(ids, [config(n) for _, n in asked])
        return [len(d.m_generation_ids[0]) for d in done]

    return run


ENGINES = {"kilat": kilat, "native": native, "vllm": vllm, "openvino": openvino}


def main() -> None:
    # engines print to stdout: the answers keep the real one to themselves
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = ENGINES[sys.argv[1]](sys.argv[2])
    run([(list(range(100, 132)), 2)])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = [(ids, n) for ids, n in json.loads(line)]
        cpu, begin = time.process_time(), time.perf_counter()
        n = run(asked)
        took = {"s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
        assert n == [count for _, count in asked], n
        print(json.dumps(took), file=answers, flush=True)


if __name__ == "__main__":
    main()
