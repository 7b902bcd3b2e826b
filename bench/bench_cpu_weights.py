"""A GGUF model with its weights in their blocks beside the same weights in bf16: speed of one stream, and how alike the tokens are.

    python bench/bench_cpu_weights.py MODEL.gguf [--tokens 128] [--turns 3] [--text FILE] [--text-tokens 2000] [--json FILE]

Both engines live in one process and take turns. Speed: one session, ``--prompt`` tokens in, ``--tokens`` out, greedy; the first token
counts as prefill. Likeness: perplexity of both on a text, and how many tokens of greedy continuations are the same until the first
that differs.
"""

import argparse
import itertools
import math
import random
import time
from pathlib import Path
from typing import Any

from kilat.cli.measures import percentile
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.llm import LLM
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

SIDES = {"blocks": "auto", "bf16": "none"}
WINDOW = 512


def one_stream(llm: LLM, prompt: list[int], n_tokens: int, name: str) -> tuple[float, list[float]]:
    """(seconds to the first token, seconds of each later one)."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, seed=0)
    begin = time.perf_counter()
    engine.submit(SessionRecord(name, prompt, params))
    times: list[float] = []
    while len(times) < n_tokens:
        events = engine.step()
        if events:
            times.append(time.perf_counter())
    return times[0] - begin, [b - a for a, b in itertools.pairwise(times)]


def perplexity(llm: LLM, ids: list[int]) -> float:
    """Over windows of WINDOW tokens that share nothing; the first token of each is given."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for first in range(0, len(ids) - WINDOW + 1, WINDOW):
        found = llm.generate(ids[first : first + WINDOW], params)[0].prompt_logprobs
        assert found is not None
        known = [t.logprob for t in found if t is not None]
        total, count = total - sum(known), count + len(known)
    return math.exp(total / count)


def same_tokens(sides: dict[str, LLM], prompts: list[list[int]], n_tokens: int) -> float:
    """Share of greedy tokens before the first difference."""
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, seed=0)
    found = [[c.samples[0].token_ids for c in llm.generate(prompts, params)] for llm in sides.values()]
    same = 0
    for a, b in zip(*found, strict=True):
        differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        same += differ[0] if differ else len(a)
    return same / (n_tokens * len(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--text", type=Path, help="for perplexity and continuations")
    parser.add_argument("--text-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind = "cpu_weights"
    options: dict[str, Any] = {
        "threads": args.threads,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "prefix_cache": False,
    }
    sides = {name: LLM(args.model, quant=quant, **options) for name, quant in SIDES.items()}
    rng = random.Random(args.seed)
    results: dict[str, dict[str, Any]] = {name: {} for name in sides}
    first: dict[str, list[float]] = {name: [] for name in sides}
    later: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.turns):
        prompt = [
            rng.randrange(1000, sides["bf16"].engine.info.vocab_size - 1000) for _ in range(args.prompt)
        ]
        for name, llm in sides.items():
            ttft, gaps = one_stream(llm, prompt, args.tokens, f"ses-{turn}")
            first[name].append(ttft)
            later[name] += gaps
    for name, llm in sides.items():
        results[name] = {
            "tok_s": 1 / percentile(later[name], 50),
            "best_tok_s": 1 / percentile(later[name], 5),
            "ttft_ms": min(first[name]) * 1e3,
            "weights_mb": llm.engine.info.ledger_bytes["weights"] / 1e6,
        }
    if args.text:
        ids = sides["bf16"].tokenizer.encode(args.text.read_text())[: args.text_tokens]
        for name, llm in sides.items():
            results[name]["perplexity"] = perplexity(llm, ids)
        prompts = [ids[i : i + 64] for i in range(0, min(len(ids), 1024) - 64, 64)]
        results["blocks"]["same_tokens"] = same_tokens(sides, prompts, 64)
    names = list(results["blocks"])
    print_table(
        f"one stream, {Path(args.model).name}",
        ["weights", *names],
        [[side, *(f"{r[n]:.3f}" if n in r else "" for n in names)] for side, r in results.items()],
    )
    info = sides["blocks"].engine.info
    subject = Subject(Path(args.model).name, "cpu", info.dtype, args.threads, info.kernels)
    shapes = {"prompt": args.prompt, "tokens": args.tokens, "text_tokens": args.text_tokens, "window": WINDOW}
    rows = [{"weights": side, **r} for side, r in results.items()]
    write_json(args.json, envelope(args, subject, shapes=shapes, results=rows))
    for llm in sides.values():
        llm.close()


if __name__ == "__main__":
    main()
