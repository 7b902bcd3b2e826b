"""Two workers on one CUDA device: pages through CUDA IPC, hand-over, and a prefix that the other worker has computed.

    PYTHONPATH=src:. python bench/cuda_cluster.py [bench/shapes/llama31-8b | tiny] [--cases pages,same,hand_over,prefix] [--out FILE.json]

The workers are what ``kilat serve`` starts (``run_worker``: engine, loop, mover, transports, beat), with random weights; this process plays
the gateway over their ZeroMQ socket. It needs torch, triton, msgspec, gguf, llguidance, pyzmq, psutil, tokenizers, huggingface-hub and httpx,
and none of the HTTP server's packages. Without a CUDA device the workers share memory of the host instead (``tiny`` is a shape for that),
and ``pages`` is left out: ``bench_page_moves.py`` measures those.

pages      all pages of another process's pool, in random order, against one copy of as many bytes on the device; goal: 70 % of it where
           many are moved (a read has a cost of its own, which is what counts where few are)
same       ids of one plain worker against those through a hand-over, a prefix of the other worker, and a move in the middle of the answer;
           greedy and seeded, 1 and 4 samples, with deterministic kernels; everything must be equal
hand_over  first token of a 4,096-token prompt with and without hand-over; when the second one follows, and what was moved
prefix     first token on the second worker behind a 2,000-token system prompt: nobody has it, or the first worker has computed it
"""

import argparse
import base64
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from cuda_gate import LIMIT_S, Gate

from kilat.base.ids import branch_id
from kilat.cluster.worker.__main__ import make_roads
from kilat.cluster.worker.main import run_worker
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.kv.board import Board
from kilat.kv.cuda_ipc import CudaIpcTransport
from kilat.wire.kv import Endpoint, KvLayout, Offer
from kilat.wire.messages import Export

GOAL_PAGES, GOAL_HAND_OVER, GOAL_HIT, GOAL_HIT_S = 0.70, 1.10, 0.25, 0.100
MOVED_BYTES = (1 << 29, 4 << 30, 16 << 30)
"""The prompt of 4,096 tokens of an 8B model, and more."""
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
}


def make_engine(settings: bytes) -> Engine:
    """Without a tokenizer: shapes have none, and no grammar is asked for. Both workers get the same random weights."""
    config = msgspec.json.decode(settings, type=EngineConfig)
    torch.manual_seed(config.seed)
    return build_engine(config)


# -- the cases ------------------------------------------------------------------------------------------------------------------------


class Draw:
    """Prompts that no other one starts like."""

    def __init__(self, gate: Gate, seed: int) -> None:
        self._random = random.Random(seed)
        self._n_vocab = gate.hello["a"].vocab_size

    def prompt(self, n: int) -> list[int]:
        return [self._random.randrange(10, self._n_vocab - 10) for _ in range(n)]


def same(gate: Gate, draw: Draw) -> dict[str, Any]:
    """Each way once for each kind of sampling and number of samples; the ids of a plain worker are the right ones."""
    ways = {"hand_over": _handed_over, "prefix": _prefixed, "moved": _moved}
    wrong: list[str] = []
    n_cells = 0
    for sampling, values in SAMPLING.items():
        for n in (1, 4):
            prompt = draw.prompt(700)
            params: dict[str, Any] = {**values, "n": n, "max_tokens": 48}
            want = gate.finish(gate.ask("a", prompt, salt=f"plain {sampling} {n}", **params))
            for way, run in ways.items():
                n_cells += 1
                got = run(gate, prompt, f"{way} {sampling} {n}", params)
                if got != want:
                    wrong.append(f"{way} {sampling} n={n}: {_first_difference(want, got)}")
    failed = [f.why for f in gate.fetched if not f.ok]
    return {"cells": n_cells, "wrong": wrong, "failed_reads": failed, "reads": len(gate.fetched)}


def _handed_over(gate: Gate, prompt: list[int], salt: str, params: dict[str, Any]) -> list[list[int]]:
    return gate.finish(gate.ask("a", prompt, salt=salt, to="b", **params))


def _prefixed(gate: Gate, prompt: list[int], salt: str, params: dict[str, Any]) -> list[list[int]]:
    gate.finish(gate.ask("a", prompt, salt=salt, max_tokens=1))
    return gate.finish(gate.ask("b", prompt, salt=salt, prefix=gate.lend(prompt, salt), **params))


def _moved(gate: Gate, prompt: list[int], salt: str, params: dict[str, Any]) -> list[list[int]]:
    record = gate.ask("a", prompt, salt=salt, **params)
    samples = [branch_id(record.session_id, k) for k in range(params["n"])]
    gate.target.update(dict.fromkeys(samples, "b"))
    gate.pump(lambda: all(len(gate.tokens(s)) >= 4 for s in samples))
    gate.send("a", Export(samples))
    return gate.finish(record)


def _first_difference(want: list[list[int]], got: list[list[int]]) -> str:
    for k, (x, y) in enumerate(zip(want, got)):
        if x != y:
            at = next((i for i, (s, t) in enumerate(zip(x, y)) if s != t), min(len(x), len(y)))
            return f"sample {k} from token {at} on"
    return "another number of samples"


def hand_over(gate: Gate, draw: Draw, repeats: int, n_prompt: int) -> dict[str, Any]:
    """Plain and handed over in turn; the first round does not count."""
    hello = gate.hello["a"]
    assert hello.layout is not None
    needed = -(-n_prompt // hello.page_tokens) * hello.layout.page_bytes
    took: dict[str, list[float]] = {"plain": [], "handed": [], "plain 2nd": [], "handed 2nd": []}
    moved = []
    for i in range(repeats + 1):
        for arm in ("plain", "handed"):
            n_fetched = len(gate.fetched)
            began_s = time.perf_counter()
            record = gate.ask("a", draw.prompt(n_prompt), to="b" if arm == "handed" else "", max_tokens=6)
            gate.finish(record)
            first, second = gate.times(record.session_id)[:2]
            if i:
                took[arm].append(first - began_s)
                took[f"{arm} 2nd"].append(second - first)
            if arm == "handed":
                moved.append(sum(f.n_bytes for f in gate.fetched[n_fetched:]))
    ms = {arm.replace(" ", "_") + "_ms": median(values) * 1e3 for arm, values in took.items()}
    ratio = median(took["handed"]) / median(took["plain"])
    return {"prompt": n_prompt, **ms, "ttft_ratio": ratio, "moved_over_needed": median(moved) / needed}


def prefix(gate: Gate, draw: Draw, repeats: int, n_system: int) -> dict[str, Any]:
    """First tokens on ``b``; a hit begins with the question what ``a`` has. The first round does not count."""
    took: dict[str, list[float]] = {"miss": [], "hit": [], "local": []}
    for i in range(repeats + 1):
        system = draw.prompt(n_system)
        gate.finish(gate.ask("a", system + draw.prompt(30), max_tokens=1))
        prompts = {"miss": draw.prompt(n_system + 30), "hit": system + draw.prompt(30)}
        prompts["local"] = system + draw.prompt(30)
        for arm, prompt in prompts.items():
            began_s = time.perf_counter()
            offer = gate.lend(prompt) if arm == "hit" else None
            record = gate.ask("b", prompt, prefix=offer, max_tokens=1)
            gate.finish(record)
            if i:
                took[arm].append(gate.times(record.session_id)[0] - began_s)
            cached = gate.cached(record.session_id)
            assert (cached == 0) == (arm == "miss"), f"{arm}: {cached} tokens were cached"
    ms = {f"{arm}_ms": median(values) * 1e3 for arm, values in took.items()}
    return {"system": n_system, **ms, "hit_over_miss": median(took["hit"]) / median(took["miss"])}


# -- pages alone ----------------------------------------------------------------------------------------------------------------------


def page_layout(page_bytes: int) -> KvLayout:
    return KvLayout(1, 1, 1, page_bytes // 4, "bfloat16", page_bytes, "bench")


def page_copier() -> Any:
    """What copies pages on the device; a machine without one has no Triton to import it with."""
    from kilat.kv.cuda_copy import copy_pages

    return copy_pages


def own_pages(n: int, page_bytes: int) -> None:
    """The child of ``pages``: a pool in which page ``p`` is full of the number ``p``, all of it offered until standard input ends."""
    view = torch.empty((n, page_bytes), dtype=torch.uint8, device="cuda")
    view.view(torch.int64)[:] = torch.arange(n, device="cuda")[:, None]
    torch.cuda.synchronize()
    board = Board()
    transport = CudaIpcTransport(page_layout(page_bytes), view, board, page_copier())
    board.open("all", range(n))
    print(base64.b64encode(transport.endpoint().address).decode(), flush=True)
    sys.stdin.read()


def pages(page_bytes: int, n_bytes: int, repeats: int) -> dict[str, Any]:
    n = n_bytes // page_bytes
    child = subprocess.Popen(
        [sys.executable, __file__, "--own", str(n), str(page_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    view = torch.zeros((n, page_bytes), dtype=torch.uint8, device="cuda")
    board = Board()
    transport = CudaIpcTransport(page_layout(page_bytes), view, board, page_copier())
    try:
        transport.connect(
            "owner", Endpoint("cuda_ipc", base64.b64decode(child.stdout.readline(), validate=False))
        )
        return {"page_bytes": page_bytes, "n_bytes": n_bytes, **_read_pages(transport, view, repeats)}
    finally:
        transport.close()
        board.close()
        child.kill()
        child.wait()


def _read_pages(transport: CudaIpcTransport, view: torch.Tensor, repeats: int) -> dict[str, Any]:
    n, page_bytes = view.shape
    source = torch.randint(0, 255, (n * page_bytes,), dtype=torch.uint8, device="cuda")
    offer = Offer("all", "owner", 0, torch.randperm(n).tolist(), 0, n, LIMIT_S)
    into = torch.randperm(n).tolist()
    moved_s, raw_s = [], []
    for _ in range(repeats + 2):  # the first two make the tensors and warm the clocks
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        transport.read(offer, range(n), into, LIMIT_S)
        while not (done := transport.poll()):
            time.sleep(0.00005)
        moved_s.append(time.perf_counter() - began_s)
        assert done[0].ok, done[0].why
        words = view.view(torch.int64)[torch.tensor(into, device="cuda")][:, :: page_bytes // 64]
        want = torch.tensor(offer.pages, device="cuda")[:, None].expand_as(words)
        assert torch.equal(words, want), "a page arrived wrong"
        view.zero_()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        view.view(-1).copy_(source)
        torch.cuda.synchronize()
        raw_s.append(time.perf_counter() - began_s)
    gb = n * page_bytes / 1e9
    moved, raw = gb / median(moved_s[2:]), gb / median(raw_s[2:])
    return {"gb_per_s": moved, "raw_gb_per_s": raw, "share": moved / raw, "best": gb / min(moved_s)}


# -- all together ---------------------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="bench/shapes/llama31-8b")
    parser.add_argument("--cases", default="pages,same,hand_over,prefix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--system", type=int, default=2000)
    parser.add_argument("--pool-gb", type=float, default=8.0, help="of each worker's pages")
    parser.add_argument("--settle-s", type=float, default=30.0, help="for what an engine does in pauses")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sha", default="", help="of the code, where there is no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--own", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def gate_of(args: argparse.Namespace, *, deterministic: bool) -> Iterator[tuple[Gate, Draw]]:
    on_cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="kc") as name:
        folder = Path(name)
        shape = args.shape
        if shape == "tiny":
            shape = str(folder)
            (folder / "config.json").write_text(json.dumps(TINY))
        config = EngineConfig(
            shape,
            "hf",
            "dummy",
            dummy_weights=True,
            max_model_len=8192,
            max_num_seqs=16,
            kv_cache_bytes=int(args.pool_gb * (1 << 30)),
            deterministic=deterministic,
            shared_pool=not on_cuda,
        )
        gate = Gate(
            [sys.executable, __file__, "--worker"],
            folder,
            config,
            ("cuda_ipc",) if on_cuda else ("shm", "tcp"),
        )
        try:
            gate.start(0.0 if deterministic else args.settle_s)  # only times need a prepared engine
            yield gate, Draw(gate, args.seed)
        finally:
            gate.close()


def main() -> int:
    args = arguments()
    if args.worker:
        return run_worker(args.worker, make_engine, make_roads)
    if args.own:
        own_pages(*args.own)
        return 0
    began_s = time.monotonic()
    cases = args.cases.split(",")
    on_cuda = torch.cuda.is_available()
    out: dict[str, Any] = {
        "bench": "cuda_cluster",
        "shape": args.shape,
        "device": torch.cuda.get_device_name() if on_cuda else platform.processor(),
        "torch": torch.__version__,
        "sha": args.sha,
        "seed": args.seed,
    }
    goals: dict[str, bool] = {}

    def note(name: str, value: Any) -> None:
        out[name] = value
        print(f"[{time.monotonic() - began_s:.0f} s] {name} {json.dumps(value)}", file=sys.stderr, flush=True)

    if on_cuda and "pages" in cases:
        note("pages", [pages(kib << 10, n, args.repeats) for kib in (256, 512, 2048) for n in MOVED_BYTES])
        goals["pages"] = all(
            p["share"] >= GOAL_PAGES for p in out["pages"] if p["n_bytes"] == MOVED_BYTES[-1]
        )
        torch.cuda.empty_cache()
    if "same" in cases:
        with gate_of(args, deterministic=True) as (gate, draw):
            note("same", same(gate, draw))
        goals["same"] = not out["same"]["wrong"] and not out["same"]["failed_reads"]
    runs = {
        "hand_over": partial(hand_over, repeats=args.repeats, n_prompt=args.prompt),
        "prefix": partial(prefix, repeats=args.repeats, n_system=args.system),
    }
    if any(name in cases for name in runs):
        with gate_of(args, deterministic=False) as (gate, draw):
            out["kernels"] = gate.hello["a"].kernels
            for name in [n for n in runs if n in cases]:
                note(name, runs[name](gate, draw))
    if "hand_over" in out:
        goals["hand_over"] = out["hand_over"]["ttft_ratio"] <= GOAL_HAND_OVER
    if "prefix" in out:
        hit = out["prefix"]
        goals["prefix"] = hit["hit_over_miss"] <= GOAL_HIT and hit["hit_ms"] < GOAL_HIT_S * 1e3
    out.update(goals=goals, wall_s=time.monotonic() - began_s)
    print(json.dumps(out, indent=1))
    if args.out:
        args.out.write_text(json.dumps(out, indent=1))
    return 0 if goals.get("same", True) else 1


if __name__ == "__main__":
    sys.exit(main())
