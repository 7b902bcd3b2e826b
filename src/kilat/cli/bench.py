"""`kilat bench throughput | latency | serve`: measure, print a table, write JSON."""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kilat.base.errors import ConfigError, EngineError
from kilat.cli import load
from kilat.cli.fetch import fetch
from kilat.cli.kernels import prepare
from kilat.cli.machine import read_machine
from kilat.cli.measures import Sample, Summary, poisson_arrivals, spread, summarize
from kilat.cli.options import engine_options
from kilat.cli.progress import RowBar
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.cli.server import Target, check_target, model_of, target
from kilat.cli.utilisation import show, watch_round
from kilat.cli.workload import Request, fresh, random_requests, read_dataset
from kilat.engine.config import EngineConfig
from kilat.load.config import read_config

if TYPE_CHECKING:
    from kilat.engine.utilisation import Utilisation
    from kilat.llm import LLM

WARM_UP = 2
WARM_UP_TOKENS = 8


def run(args: argparse.Namespace) -> int:
    """Exit status 0, or 1 when a request failed."""
    kinds = {"throughput": _throughput, "latency": _latency, "serve": _serve}
    return kinds[args.kind](args)


def _throughput(args: argparse.Namespace) -> int:
    # brings torch; the other kinds measure over HTTP and do without
    from kilat.llm import LLM

    name = model_of(args)
    if name is None:
        raise ConfigError("got no model: name one (kilat model list shows some)")
    requests = _requests(args)
    fetch(name)
    prepare(args, lambda text: print(f"{args.parser.prog}: {text}", file=sys.stderr))
    with LLM(name, **engine_options(args)) as llm:
        gc.freeze()  # as in a worker
        info = llm.engine.info
        _offline_round(llm, _warm_up(args), "warm-up")
        rounds = [
            summarize(_offline_round(llm, fresh(requests, r), f"round {r + 1}"), {})
            for r in range(args.repeat)
        ]
        use = _watched_round(args, llm, fresh(requests, args.repeat)) if args.utilisation else None
    lines = [
        [f"{i}", f"{s.request_rps:.2f}", f"{s.output_tps:.1f}", f"{s.total_tps:.1f}", f"{s.elapsed_s:.2f}"]
        for i, s in enumerate(rounds, 1)
    ]
    columns = ("round", "requests/s", "output tok/s", "total tok/s", "seconds")
    print_table(f"throughput of {name}, {info.dtype}: {len(requests)} requests at once", columns, lines)
    fields = {"load": {"requests": len(requests)}, "shapes": _shapes(requests, rounds[0]), **_figures(rounds)}
    if args.utilisation:
        show(use)
        fields["utilisation"] = asdict(use) if use else None
    write_json(args.json, envelope(args, _local_subject(args, name), **fields))
    return 0


def _watched_round(args: argparse.Namespace, llm: "LLM", requests: Sequence[Request]) -> "Utilisation | None":
    """A round of its own, since a profiler makes steps slower."""
    n_output = sum(q.output_tokens for q in requests)
    threads = args.threads or read_machine().cores
    return watch_round(llm.engine, n_output, threads, lambda: _offline_round(llm, requests, "watched round"))


def _offline_round(llm: "LLM", requests: Sequence[Request], title: str) -> list[Sample]:
    """All requests at once, to their full length."""
    from kilat.wire.sampling import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=q.output_tokens, ignore_eos=True) for q in requests]
    with RowBar(title, len(requests)) as bar:
        began = time.perf_counter()
        done = llm.generate([q.prompt for q in requests], params, on_finish=lambda *_: bar.advance())
        ended = time.perf_counter()
    return [
        Sample(began, began, ended, (ended,), len(c.prompt_ids), len(c.samples[0].token_ids), c.cached_tokens)
        for c in done
    ]


def _latency(args: argparse.Namespace) -> int:
    by_length: dict[int, list[Sample]] = {}
    with target(args) as server:
        _warm(args, server)
        with RowBar("streams", args.repeat * len(args.input_len)) as bar:
            for words in args.input_len:
                seed = f"latency {args.seed or 0} {words}"
                requests = random_requests(args.repeat, words, args.output_len, seed)
                by_length[words] = asyncio.run(load.closed_loop(server, requests, 1, bar.advance))
    lines, results = [], []
    for words, samples in by_length.items():
        _require_answers(samples)
        tokens = samples[0].input_tokens
        ttft = spread([s.ttft_s * 1e3 for s in samples])
        tpot = spread([(s.tpot_s or 0.0) * 1e3 for s in samples])
        results.append(
            {
                "input_words": words,
                "input_tokens": tokens,
                "output_tokens": args.output_len,
                "ttft_ms": ttft,
                "tpot_ms": tpot,
            }
        )
        rate = 1e3 / tpot["median"] if tpot["median"] else 0.0
        lines.append([f"{words}", f"{tokens}", _range(ttft), _range(tpot), f"{rate:.1f}"])
    columns = ("words", "prompt tokens", "TTFT ms (min-max)", "TPOT ms (min-max)", "tok/s")
    print_table(f"latency of {server.source}: one stream, {args.repeat} rounds", columns, lines)
    write_json(args.json, envelope(args, _subject(args, server), load={"clients": 1}, results=results))
    return 0


def _serve(args: argparse.Namespace) -> int:
    check_target(args)
    requests = _requests(args)
    slo_ms = args.slo or {}
    rounds: list[Summary] = []
    errors: list[str] = []
    with target(args) as server:
        _warm(args, server)
        for r in range(args.repeat):
            batch = fresh(requests, r)
            with RowBar(f"round {r + 1}", len(batch)) as bar:
                if args.rate:
                    arrivals = poisson_arrivals(args.rate, len(batch), (args.seed or 0) + r)
                    samples = asyncio.run(load.open_loop(server, batch, arrivals, bar.advance))
                else:
                    samples = asyncio.run(load.closed_loop(server, batch, args.clients, bar.advance))
            errors += [s.error for s in samples if s.error]
            rounds.append(summarize(samples, slo_ms))
    how = f"{args.rate:g} requests/s" if args.rate else f"{args.clients} clients"
    _print_rounds(f"serving {server.source}: {len(requests)} requests, {how}", rounds, slo_ms)
    if errors:
        print(f"{len(errors)} requests failed, the first: {errors[0]}")
    traffic = {"rate_rps": args.rate, "clients": args.clients, "requests": len(requests), "slo_ms": slo_ms}
    fields = {
        "load": traffic,
        "shapes": _shapes(requests, rounds[0]),
        "first_error": errors[0] if errors else None,
    }
    write_json(args.json, envelope(args, _subject(args, server), **fields, **_figures(rounds)))
    return 1 if errors else 0


def _print_rounds(title: str, rounds: Sequence[Summary], slo_ms: dict[str, float]) -> None:
    lines = []
    for name, unit in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "end to end")):
        for i, s in enumerate(rounds, 1):
            d = getattr(s, f"{name}_ms")
            cells = [f"{d[p]:.1f}" if d else "-" for p in ("mean", "p50", "p90", "p99")]
            lines.append([f"{unit} ms" + (f", round {i}" if len(rounds) > 1 else ""), *cells])
    print_table(title, ("", "mean", "p50", "p90", "p99"), lines)
    for i, s in enumerate(rounds, 1):
        goodput = f", goodput {s.goodput_rps:.2f} requests/s" if slo_ms else ""
        print(
            f"round {i}: {s.output_tps:.1f} output tok/s, {s.total_tps:.1f} total tok/s, "
            f"{s.request_rps:.2f} requests/s{goodput}; "
            f"{s.errors} errors, {s.cached_tokens} cached tokens, client late by at most {s.late_ms:.1f} ms"
        )


def _requests(args: argparse.Namespace) -> list[Request]:
    if args.dataset is not None:
        return read_dataset(args.dataset, args.requests)
    return random_requests(args.requests, args.input_len, args.output_len, f"{args.kind} {args.seed or 0}")


def _warm_up(args: argparse.Namespace) -> list[Request]:
    return random_requests(WARM_UP, 32, WARM_UP_TOKENS, f"warm-up {args.seed or 0}")


def _warm(args: argparse.Namespace, server: Target) -> None:
    samples = asyncio.run(load.closed_loop(server, _warm_up(args), WARM_UP, lambda: None))
    _require_answers(samples)


def _require_answers(samples: Sequence[Sample]) -> None:
    error = next((s.error for s in samples if s.error), None)
    if error is not None:
        raise EngineError(f"a request failed: {error}")


def _shapes(requests: Sequence[Request], summary: Summary) -> dict[str, float]:
    """Mean tokens per request, as the server counted them and as they were asked for."""
    answered = max(summary.requests - summary.errors, 1)
    output = summary.output_tps * summary.elapsed_s
    return {
        "input_tokens": (summary.total_tps * summary.elapsed_s - output) / answered,
        "output_tokens": output / answered,
        "asked_output_tokens": sum(r.output_tokens for r in requests) / len(requests),
    }


def _figures(rounds: Sequence[Summary]) -> dict[str, object]:
    names = ("request_rps", "output_tps", "total_tps", "goodput_rps")
    return {
        "rounds": [asdict(s) for s in rounds],
        "spread": {name: spread([getattr(s, name) for s in rounds]) for name in names},
    }


def _subject(args: argparse.Namespace, server: Target) -> Subject:
    """What was measured; a server given by URL does not tell much."""
    name = model_of(args)
    if server.child is None or name is None:
        return Subject(server.source, None, None, None, None)
    return _local_subject(args, name)


def _local_subject(args: argparse.Namespace, name: str) -> Subject:
    """The choices of an engine with these options on this machine. Brings torch: call it after measuring."""
    from kilat.engine.build import choose_device, choose_dtype, choose_kernels

    settings = EngineConfig(model_path="", model_kind="gguf", model_id=name, **engine_options(args))
    device = choose_device(settings.device)
    threads = settings.threads or read_machine().cores
    dtype = str(choose_dtype(settings.dtype, read_config(fetch(name)))).removeprefix("torch.")
    chosen = choose_kernels(settings.kernels, device, threads, exact=settings.deterministic)
    return Subject(name, device.type, dtype, threads, f"{chosen.name}: {chosen.why}")


def _range(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['min']:.1f}-{values['max']:.1f})"
