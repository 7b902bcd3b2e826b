"""kilat beside other engines on this machine's processor, in turn, so that whatever else the machine does meets all of them.

    python bench/bench_cpu_peers.py streams --engine kilat=MODEL --engine vllm=MODEL,python=BIN,env=K=V,env=K=V ... [--rounds 5]
    python bench/bench_cpu_peers.py offline --engine ... --dataset requests.jsonl [--rounds 2]
    python bench/bench_cpu_peers.py served --server kilat=URL,pid=N --server vllm=URL,pid=N --dataset requests.jsonl [--clients 1 4 16 32]

``streams``: one stream; time to the first token of prompts of each length (real text of the data set, no two alike), and tokens/s of
128 tokens after 128. ``offline``: all requests of the data set at once. Both start each engine once, in a process of its own
(peer_engine.py), with ``python`` and ``env`` where it needs another environment; ``llama.cpp=MODEL.gguf,program=llama_gaps`` is
bench/llama_gaps.cpp, a process a measurement, its load left out. ``served``: `kilat bench serve` against servers that run already;
``pid`` is a server's first process.

Rounds go over all engines. ``own`` is the share of the machine's busy time that the measured engine had itself: the rest was other
work, and in ``served`` the load generator. ``--lock FILE`` is held for each turn of all engines, for machines where several benchmarks share that
file.
"""

import argparse
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilat.cli.fetch import fetch
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.text.tokenizer import Tokenizer

DECODE_CONTEXT = 128
DECODE_TOKENS = 128
SETTLE_S = 0.5
"""Before each measurement: threads of an engine that has just worked spin for a while before they sleep."""
HZ = os.sysconf("SC_CLK_TCK")
REFUSED = "an engine ended, or said nothing that was asked"


@dataclass(frozen=True)
class Named:
    """``name=first,key=value,...`` of the command line; a key may come several times."""

    name: str
    first: str
    more: dict[str, list[str]]

    @classmethod
    def parse(cls, text: str) -> "Named":
        name, _, rest = text.partition("=")
        first, *pairs = rest.split(",")
        more: dict[str, list[str]] = {}
        for pair in pairs:
            key, _, value = pair.partition("=")
            more.setdefault(key, []).append(value)
        return cls(name, first, more)

    def one(self, key: str, default: str = "") -> str:
        return self.more.get(key, [default])[0]


def busy_s() -> float:
    """Seconds of all processors that were not idle, since boot."""
    user, nice, system, _, _, irq, soft = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + soft) / HZ


def tree_s(pid: int) -> float:
    """Processor seconds of a process and all below it that live."""
    parents, took = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            parents[int(folder.name)] = int(fields[1])
            took[int(folder.name)] = sum(map(int, fields[11:15])) / HZ  # with children that have ended

    def below(at: int) -> bool:
        while at > 1 and at != pid:
            at = parents.get(at, 0)
        return at == pid

    return sum(seconds for p, seconds in took.items() if below(p))


class Engine:
    """A process that runs peer_engine.py."""

    def __init__(self, given: Named) -> None:
        script = str(Path(__file__).with_name("peer_engine.py"))
        env = os.environ | dict(pair.split("=", 1) for pair in given.more.get("env", []))
        command = [given.one("python", sys.executable), script, given.one("kind", given.name), given.first]
        with tempfile.NamedTemporaryFile("w", suffix=f".{given.name}.log", delete=False) as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )
        begin = time.perf_counter()
        self._answer(log.name)
        print(f"{given.name}: ready after {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        self.pid, self._log = self._process.pid, log.name

    def _answer(self, log: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{REFUSED}: see {log}")
        return line

    def run(self, asked: list[tuple[list[int], int]]) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._answer(self._log))["s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class LlamaGaps:
    """bench/llama_gaps.cpp: a process for each measurement, which loads and then times its tokens."""

    pid = os.getpid()

    def __init__(self, given: Named) -> None:
        self._command = [given.one("program"), given.first, given.one("threads", str(os.cpu_count()))]

    def run(self, asked: list[tuple[list[int], int]]) -> float:
        (ids, n), *others = asked
        assert not others, "one stream only"
        command = [*self._command, str(len(ids) + n + 8), str(n - 1), *map(str, ids)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        return sum(map(float, done.stdout.split())) / 1e3

    def close(self) -> None:
        pass


@dataclass
class Found:
    """Values of the rounds by measure, and the shares of the machine that the engine had meanwhile."""

    values: dict[str, list[float]] = field(default_factory=dict)
    own: dict[str, list[float]] = field(default_factory=dict)

    def add(self, measure: str, value: float, own: float) -> None:
        self.values.setdefault(measure, []).append(value)
        self.own.setdefault(measure, []).append(own)

    def report(self) -> dict[str, Any]:
        return {
            m: {
                "median": round(statistics.median(v), 2),
                "all": [round(x, 2) for x in v],
                "own_percent": [round(100 * x) for x in self.own[m]],
            }
            for m, v in self.values.items()
        }


def timed(pid: int, work: Callable[[], float]) -> tuple[float, float]:
    """(what ``work`` says, share of the machine's busy time that ``pid``'s processes had)."""
    time.sleep(SETTLE_S)
    own, busy = tree_s(pid), busy_s()
    value = work()
    return value, (tree_s(pid) - own) / max(busy_s() - busy, 1 / HZ)


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Alone among those who hold the same file."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def texts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def streams(args: argparse.Namespace, encode: Callable[[str], list[int]]) -> dict[str, Found]:
    text = encode("\n\n".join(r["prompt"] for r in texts(args.dataset)))
    text = text * (2 * max(args.lengths) // len(text) + 2)
    rng = random.Random(args.seed)

    def prompt(n: int) -> list[int]:
        first = rng.randrange(len(text) - n)
        return text[first : first + n]

    engines = start(args)
    found = {name: Found() for name in engines}
    for r in range(args.rounds + 1):  # the first warms up
        with turn(args.lock):
            for n in args.lengths:
                ids = prompt(n)
                for name, e in engines.items():
                    value, own = timed(e.pid, lambda e=e, ids=ids: e.run([(ids, 1)]))
                    if r:
                        found[name].add(f"ttft_{n}_ms", 1e3 * value, own)
            for name, e in engines.items():
                if r:
                    found[name].add(
                        "decode_tps", *timed(e.pid, lambda e=e: decode_tps(e, prompt(DECODE_CONTEXT)))
                    )
        print(f"round {r} of {args.rounds}", file=sys.stderr)
    stop(engines)
    return found


def decode_tps(engine: Engine | LlamaGaps, ids: list[int]) -> float:
    first = engine.run([(ids, 1)])
    return DECODE_TOKENS / (engine.run([(ids, DECODE_TOKENS + 1)]) - first)


def offline(args: argparse.Namespace, encode: Callable[[str], list[int]]) -> dict[str, Found]:
    asked = [(encode(r["prompt"]), int(r["output_tokens"])) for r in texts(args.dataset)]
    n_out = sum(n for _, n in asked)
    engines = start(args)
    found = {name: Found() for name in engines}
    for r in range(args.rounds):
        for name, e in engines.items():
            with turn(args.lock):
                value, own = timed(e.pid, lambda e=e: n_out / e.run(asked))
            found[name].add("output_tps", value, own)
            print(f"round {r}, {name}: {value:.1f} tokens/s, own {100 * own:.0f} %", file=sys.stderr)
    stop(engines)
    return found


def start(args: argparse.Namespace) -> dict[str, Engine | LlamaGaps]:
    return {g.name: LlamaGaps(g) if "program" in g.more else Engine(g) for g in args.engine}


def stop(engines: dict[str, Engine | LlamaGaps]) -> None:
    for engine in engines.values():
        engine.close()


def served(args: argparse.Namespace) -> dict[str, Found]:
    found = {g.name: Found() for g in args.server}
    for r in range(args.rounds):
        for clients in args.clients:
            for server in args.server:
                with turn(args.lock):
                    one_load(args, server, clients, found[server.name])
                last = {m: v[-1] for m, v in found[server.name].values.items() if m.startswith(f"{clients} ")}
                print(f"round {r}, {server.name}: {last}", file=sys.stderr, flush=True)
    return found


def one_load(args: argparse.Namespace, server: Named, clients: int, found: Found) -> None:
    requests = min(args.requests, 6 if clients == 1 else 18 if clients <= 4 else args.requests)
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            sys.executable,
            "-m",
            "kilat.cli",
            "bench",
            "serve",
            "--url",
            server.first,
            "--model",
            args.name,
        ]
        command += [
            "--clients",
            str(clients),
            "--requests",
            str(requests),
            "--dataset",
            str(args.dataset),
            "--json",
            out.name,
        ]

        def load() -> float:
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=900
            )
            return 0.0

        _, own = timed(int(server.one("pid", "0")), load)
        got = json.loads(Path(out.name).read_text())["rounds"][0]
    if got["errors"]:
        raise RuntimeError(f"{REFUSED}: {got['errors']} requests failed at {server.name}")
    found.add(f"{clients} output_tps", got["output_tps"], own)
    for measure in ("ttft_ms", "tpot_ms"):
        for p in ("p50", "p99"):
            found.add(f"{clients} {measure} {p}", got[measure][p], own)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("streams", "offline", "served"))
    parser.add_argument("--engine", type=Named.parse, action="append", default=[])
    parser.add_argument("--server", type=Named.parse, action="append", default=[])
    parser.add_argument(
        "--tokenizer", help="a model whose tokenizer all engines have (default: the first engine's)"
    )
    parser.add_argument("--dataset", type=Path, required=True, help="JSONL of {prompt, output_tokens}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--requests", type=int, default=64, help="at 16 clients and more; 6 at 1, 18 at 4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="m", help="of the model at the servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.kind == "served":
        found = served(args)
    else:
        model = args.tokenizer or args.engine[0].first
        encode = Tokenizer.from_files(fetch(model)).encode
        found = (streams if args.kind == "streams" else offline)(args, encode)
    results = {name: f.report() for name, f in found.items()}
    measures = list(dict.fromkeys(m for r in results.values() for m in r))
    lines = [[m, *(f"{r[m]['median']:,.1f}" if m in r else "" for r in results.values())] for m in measures]
    print_table(f"{args.kind}, medians of {args.rounds} rounds", ("", *results), lines)
    subject = Subject(
        Path(args.engine[0].first).name if args.engine else args.name, "cpu", "bfloat16", os.cpu_count(), None
    )
    write_json(args.json, envelope(args, subject, results=results))


if __name__ == "__main__":
    main()
