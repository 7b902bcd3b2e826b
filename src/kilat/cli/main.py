"""The table of commands and flags. Nothing but the parser lives here: a command's file is imported when the
command runs.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

import kilat
from kilat.base.errors import ConfigError, KilatError
from kilat.cli.options import (
    Parser,
    amount,
    engine_flags,
    input_file,
    integer,
    lengths,
    number,
    output_file,
    ray_flags,
    server_url,
    slo,
)

MODEL_HELP = "a name from `kilat model list`, a .gguf file, a Hugging Face folder, or a hub id"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong options, 130 interrupted."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(_unknown(args.parser, unknown[0]))
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return importlib.import_module(args.command).run(args)
    except KilatError as e:
        print(f"{args.parser.prog}: {e.message}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kilat model list | head`
        return 141


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="kilat", description="LLM inference engine and serving system.")
    parser.add_argument("--version", action="version", version=f"kilat {kilat.__version__}")
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    _serve(_command(commands, "serve", "serve a model over the OpenAI API"))
    for verb, text, seconds in (
        ("up", "serve as a file says, and go on after this command", 900.0),
        ("down", "end what kilat up has started, after its running requests", 60.0),
    ):
        one = _command(commands, verb, text, "up")
        one.add_argument(
            "file", type=input_file, metavar="CLUSTER.yaml", help="docs/deploy.md says what it holds"
        )
        one.add_argument(
            "--timeout", type=number(1, 86400), default=seconds, metavar="S", help=f"default {seconds:g}"
        )
        one.set_defaults(verb=verb)
    _top(_command(commands, "top", "watch the workers of a server: load, pages, queues, moves, hit rates"))
    drain = _command(commands, "drain", "move the sessions of a worker to the others, then end its process")
    drain.add_argument("worker", metavar="WORKER", help="its name, as kilat top shows it")
    drain.add_argument("--restart", action="store_true", help="start a new worker in its place")
    _server(drain)
    cache = _command(commands, "cache", "look into the prefix cache of a server")
    asks = cache.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    explain = _command(asks, "explain", "why the start of a prompt was, or was not, found", "cache")
    explain.add_argument(
        "id", metavar="ID", help="the id of an answer: its field id, or its header x-request-id"
    )
    _server(explain)
    _chat(_command(commands, "chat", "talk to a model in the terminal"))
    _run(_command(commands, "run", "answer every row of a JSONL file; run it again to go on after a kill"))
    _native(_command(commands, "native", "one prompt, one stream, in the C runtime: no torch, no server"))
    bench = _command(commands, "bench", "measure throughput, latency, or serving under load")
    kinds = bench.add_subparsers(metavar="KIND", required=True, parser_class=Parser)
    _bench_throughput(_command(kinds, "throughput", "offline: all requests at once", "bench"))
    _bench_latency(
        _command(kinds, "latency", "one stream: time to first token and per token by prompt length", "bench")
    )
    _bench_serve(_command(kinds, "serve", "streams at an arrival rate or from a number of clients", "bench"))
    model = _command(commands, "model", "list, download and inspect models")
    verbs = model.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    _command(verbs, "list", "the catalogue, and what is on this disk", "model").set_defaults(verb="list")
    for verb, text in (
        ("pull", "download a model, going on where it stopped"),
        ("info", "describe a model, without loading it"),
    ):
        one = _command(verbs, verb, text, "model")
        one.add_argument("model", metavar="MODEL", help=MODEL_HELP)
        one.set_defaults(verb=verb)
    doctor = _command(commands, "doctor", "check this machine, and whether a model would fit")
    doctor.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    _engine(doctor)
    return parser


def _command(
    commands: "argparse._SubParsersAction[Parser]", name: str, text: str, file: str | None = None
) -> Parser:
    one = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    one.set_defaults(command=f"kilat.cli.{file or name}", parser=one)
    return one


def _engine(parser: Parser) -> None:
    group = parser.add_argument_group("engine")
    for flag, kwargs in engine_flags():
        group.add_argument(flag, default=None, **kwargs)


def _model(parser: Parser) -> None:
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help=MODEL_HELP)


def _target(parser: Parser) -> None:
    """A server that runs already, or a model to serve for the time of this command."""
    parser.add_argument(
        "--url",
        type=server_url,
        metavar="URL",
        help="use this OpenAI-compatible server instead of starting one",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help=f"{MODEL_HELP}; with --url the name the server knows"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key for --url")
    _engine(parser)


def _server(parser: Parser) -> None:
    """A server that runs already."""
    parser.add_argument(
        "--url",
        type=server_url,
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="the server (default http://127.0.0.1:8000)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="its API key")


def _top(parser: Parser) -> None:
    parser.add_argument(
        "--interval",
        type=number(0.1, 3600),
        metavar="S",
        default=1.0,
        help="seconds between looks (default 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="show one table and end; so does output that is no terminal"
    )
    _server(parser)


def _serve(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; others than loopback need an API key (default 127.0.0.1)",
    )
    add("--port", type=integer(0, 65535), default=8000, help="0 takes a free one (default 8000)")
    add("--api-key", action="append", default=[], metavar="KEY", help="accept this key; may be given again")
    add("--api-key-file", type=input_file, metavar="FILE", help="accept the keys in this file, one a line")
    add(
        "--workers",
        type=integer(0, 256),
        metavar="N",
        help="processes that each run the model, on their own part of the cores (default 1, or 0 with --prefill and --decode)",
    )
    for flag, name, text in (
        ("--prefill", "P", "workers that compute long prompts and hand them over (needs --decode)"),
        (
            "--decode",
            "D",
            "workers that go on after the first token, undisturbed by long prompts (needs --prefill)",
        ),
    ):
        add(flag, type=integer(0, 256), default=0, metavar=name, help=text)
    _targets(parser)
    _caches(parser)
    add("--served-model-name", metavar="NAME", help="name that clients use (default: MODEL's)")
    add(
        "--drain-timeout",
        type=number(0, 86400),
        default=30.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM (default 30)",
    )
    ray = parser.add_argument_group("workers on many hosts (they need the extra kilat[ray])")
    for flag, kwargs in ray_flags():
        ray.add_argument(flag, **kwargs)
    # For commands that start a server: it must not outlive them, however they die.
    add("--stop-at-stdin-end", action="store_true", help=argparse.SUPPRESS)
    _engine(parser)


def _targets(parser: Parser) -> None:
    add = parser.add_argument
    for flag, text in (
        ("--ttft-slo", "target of the time to the first token"),
        ("--tpot-slo", "target of the time per token after it"),
    ):
        add(
            flag,
            type=number(0.1, 1e7),
            metavar="MS",
            help=f"{text}, in milliseconds; with both, workers' shares of prefill and decode follow the traffic",
        )
    add(
        "--max-workers",
        type=integer(0, 256),
        default=0,
        metavar="N",
        help="with both targets: add workers while the traffic needs them, up to N in all, and end those that it no longer needs",
    )


def _caches(parser: Parser) -> None:
    add = parser.add_argument
    for flag, text in (
        ("--host-cache-gb", "the host's memory (CUDA devices only)"),
        ("--disk-cache-gb", "a disk, also after a restart"),
    ):
        add(
            flag,
            type=number(0, 1e6),
            default=0.0,
            metavar="GB",
            help=f"keep KV pages that no longer fit in so much of {text}; all workers together (default 0: off)",
        )
    add(
        "--disk-cache-dir", metavar="DIR", help="where --disk-cache-gb keeps them (default: the cache folder)"
    )


def _chat(parser: Parser) -> None:
    add = parser.add_argument
    _model(parser)
    add("--system", metavar="TEXT", help="system prompt")
    add("--temperature", type=number(0, 100), metavar="T", help="0 is greedy (default: the server's)")
    add("--max-tokens", type=integer(1, 2**24), metavar="N", help="longest answer")
    _target(parser)


def _run(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "input",
        type=input_file,
        metavar="IN.jsonl",
        help='rows {"custom_id", "body"}, {"messages"} or {"prompt"}',
    )
    add(
        "output",
        type=output_file,
        metavar="OUT.jsonl",
        help="finished rows; OUT.jsonl.journal beside it says what they belong to",
    )
    add("--concurrency", type=integer(1, 4096), default=64, metavar="N", help="rows in flight (default 64)")
    add(
        "--retries",
        type=integer(0, 100),
        default=8,
        metavar="N",
        help="per row, for errors that may pass (default 8)",
    )
    add(
        "--row-timeout",
        type=number(1, 86400),
        default=3600.0,
        metavar="S",
        help="seconds per try (default 3600)",
    )
    _target(parser)


def _native(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("-p", "--prompt", required=True, metavar="TEXT", help="what to go on with")
    add("--chat", action="store_true", help="TEXT is a user's message, in the model's chat template")
    add("--max-tokens", type=integer(1, 2**24), default=128, metavar="N", help="most tokens (default 128)")
    add("--temperature", type=number(0, 100), default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=integer(0, 2**24), default=0, metavar="K", help="0 is off (default)")
    add("--top-p", type=number(1e-9, 1), default=1.0, metavar="P", help="1 is off (default)")
    add("--min-p", type=number(0, 1), default=0.0, metavar="P", help="0 is off (default)")
    add("--seed", type=integer(0, 2**63 - 1), default=0, metavar="S", help="of the draws (default 0)")
    add("--ignore-eos", action="store_true", help="go on after an id that ends a text")
    add(
        "--context", type=integer(1, 2**24), default=0, metavar="N", help="default: the model's, at most 4096"
    )
    add("--threads", type=integer(1, 1024), default=0, metavar="N", help="default: one per processor")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of activations and KV")
    add(
        "--weights",
        choices=("auto", "stored", "wide"),
        default="auto",
        help="stored: block formats stay as they are",
    )
    add("--library", type=input_file, metavar="FILE", help="a libkilat.so of `make -C native CUDA=...`")
    add("--stats", action="store_true", help="times and memory, on stderr")


def _bench_throughput(parser: Parser) -> None:
    parser.set_defaults(kind="throughput")
    _model(parser)
    parser.add_argument("--model", metavar="MODEL", help="the same as MODEL")
    parser.add_argument(
        "--utilisation",
        action="store_true",
        help="watch steps of one more round: busy share of the device, shares of its roofs, named gaps",
    )
    _workload(parser, repeat=3)
    _engine(parser)


def _bench_latency(parser: Parser) -> None:
    parser.set_defaults(kind="latency")
    parser.add_argument(
        "--input-len",
        type=lengths,
        default=[32, 256, 1024],
        metavar="N,N",
        help="words per prompt (default 32,256,1024)",
    )
    parser.add_argument(
        "--output-len", type=amount(2, 2**20), default=64, metavar="N", help="tokens (default 64)"
    )
    _report(parser, repeat=5)
    _model(parser)
    _target(parser)


def _bench_serve(parser: Parser) -> None:
    parser.set_defaults(kind="serve")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--rate", type=number(1e-3, 1e6), metavar="R", help="requests per second, Poisson arrivals"
    )
    load.add_argument(
        "--clients", type=integer(1, 65536), metavar="C", help="clients that each keep one request open"
    )
    parser.add_argument(
        "--slo", type=slo, metavar="ttft=MS,tpot=MS", help="count the requests within these as goodput"
    )
    _workload(parser, repeat=1)
    _model(parser)
    _target(parser)


def _workload(parser: Parser, repeat: int) -> None:
    add = parser.add_argument
    add("--requests", type=integer(1, 10**7), default=64, metavar="N", help="number of requests (default 64)")
    add(
        "--dataset",
        type=input_file,
        metavar="FILE",
        help='JSON or JSONL of {"prompt", "output_tokens"} (default: random words)',
    )
    add(
        "--input-len",
        type=amount(1, 2**20),
        default=128,
        metavar="N",
        help="words per random prompt (default 128)",
    )
    add("--output-len", type=amount(2, 2**20), default=64, metavar="N", help="tokens per answer (default 64)")
    _report(parser, repeat)


def _report(parser: Parser, repeat: int) -> None:
    parser.add_argument(
        "--repeat", type=integer(1, 1000), default=repeat, metavar="N", help=f"rounds (default {repeat})"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the measurement here too")


def _unknown(parser: Parser, argument: str) -> str:
    flag = argument.split("=")[0]
    known = [
        o for action in parser._actions for o in action.option_strings if action.help != argparse.SUPPRESS
    ]
    near = difflib.get_close_matches(flag, known, n=1) if flag.startswith("-") else []
    return f"got {argument!r}, which is no option here" + (f"; did you mean {near[0]}?" if near else "")
