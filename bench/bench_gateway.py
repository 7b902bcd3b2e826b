"""Streamed token events per second of a gateway process on one core.

    python bench/bench_gateway.py [--rates 5000,10000,20000] [--streams 32] [--seconds 8] [--whole 500] [--model FILE.gguf] [--json OUT.json]

A worker process without a model says one token per stream and step at a given rate; a client process reads all streams. The gateway
is bound to one core. Events that the client received one by one are counted, and the CPU time the gateway process used for them:
when it falls behind it joins tokens, which shows as fewer events than tokens. A rate of 0 means as fast as the worker can. ``--whole N``: all streams
run to their end after N tokens instead; every one must have all of them, in order, and its end.
"""

import argparse
import json
import os
import platform
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kilat.cli.machine import read_machine, source_sha
from kilat.cluster.config import ServeConfig
from kilat.cluster.launch import serve
from kilat.cluster.worker.main import run_worker
from kilat.wire.messages import SessionEvent
from kilat.wire.session import SessionRecord

MAX_TOKENS = 1_000_000
WARM_S = 1.5
WHOLE_S = 300.0


@dataclass(frozen=True)
class Pace:
    """Settings of the worker: events per second over all streams (0: no limit), and how many streams to wait for."""

    rate: float
    streams: int
    vocab_size: int
    tokens: int


class Metronome:
    """An engine that gives every session one token per tick."""

    def __init__(self, pace: Pace) -> None:
        self._period_s = pace.streams / pace.rate if pace.rate else 0.0
        self._streams = pace.streams
        self._vocab = pace.vocab_size
        self._tokens = pace.tokens
        self._n_submitted = 0
        self._seqs: dict[str, int] = {}
        self._next_s = 0.0
        self.step_count = 0
        self.info = SimpleNamespace(
            model_id="metronome",
            max_model_len=2 * MAX_TOKENS,
            max_num_seqs=pace.streams,
            vocab_size=pace.vocab_size,
            page_tokens=16,
            n_pages=1,
            eos_ids=(),
            kernels="none",
            ledger_bytes={},
        )

    @property
    def has_work(self) -> bool:
        return self._n_submitted >= self._streams and bool(self._seqs)

    def submit(self, record: SessionRecord, arrived: object = None, *, hand_over: bool = False) -> None:
        self._seqs[record.session_id] = 0
        self._n_submitted += 1
        self._next_s = time.monotonic()

    def take_frozen(self) -> list[str]:
        return []

    def prepare(self) -> bool:
        return False

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        for session_id in session_ids:
            self._seqs.pop(session_id, None)
        return []

    def step(self) -> list[SessionEvent]:
        if self._period_s:
            self._next_s += self._period_s
            time.sleep(max(0.0, self._next_s - time.monotonic()))
        self.step_count += 1
        token = 300 + self.step_count * 7 % 5000
        token = token % self._vocab if token >= self._vocab else token
        finish = "length" if self.step_count == self._tokens else None
        events = [SessionEvent(s, 0, seq, [token], finish) for s, seq in self._seqs.items()]
        for event in events:
            self._seqs[event.session_id] += 1
        if finish:
            self._seqs.clear()
        return events

    def counters(self) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def worker_role(path: str) -> int:
    return run_worker(Path(path), lambda raw: Metronome(msgspec.json.decode(raw, type=Pace)))


def server_role(options: str) -> int:
    given = json.loads(options)
    os.sched_setaffinity(0, {given["core"]})
    config = ServeConfig(
        files=SimpleNamespace(kind=given["kind"], path=Path(given["path"])),
        engine=Pace(given["rate"], given["streams"], given["vocab_size"], given["tokens"]),
        served_model_name="bench",
        port=0,
        drain_s=0.0,
        max_lag_tokens=10**9,
    )
    return serve(
        config, worker_command=("taskset", "-c", given["others"], sys.executable, __file__, "--worker")
    )


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, for runs without ``--model``."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    letters = [chr(b) if b in plain else chr(next(moved)) for b in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_streams(url: str, n: int, n_tokens: int) -> list[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    asked = {"prompt": "x", "max_tokens": n_tokens, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    out = []
    for _ in range(n):
        s = socket.create_connection((host, int(port)))
        s.sendall(head.encode() + body)
        out.append(s)
    return out


def read_streams(sockets: list[socket.socket], seconds: float) -> tuple[int, int]:
    """(events, bytes) that arrive on all streams within ``seconds``."""
    n_events = n_bytes = 0
    with selectors.DefaultSelector() as selector:
        for s in sockets:
            selector.register(s, selectors.EVENT_READ)
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                n_events += data.count(b"data: ")
                n_bytes += len(data)
    return n_events, n_bytes


def read_whole(sockets: list[socket.socket], seconds: float) -> list[bytes]:
    """What each stream says until its end, or within ``seconds``."""
    said = {s: bytearray() for s in sockets}
    with selectors.DefaultSelector() as selector:
        for s in sockets:
            selector.register(s, selectors.EVENT_READ)
        end_s = time.monotonic() + seconds
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                one: socket.socket = key.fileobj  # type: ignore[assignment]
                data = one.recv(1 << 18)
                said[one] += data
                if not data or b"data: [DONE]" in said[one][-64:]:
                    selector.unregister(one)
    return [bytes(said[s]) for s in sockets]


def losses(said: list[bytes], n_tokens: int) -> dict[str, Any]:
    """Streams without their end, and those whose number of tokens or text is not that of all."""
    texts: Counter[str] = Counter()
    bad = 0
    for data in said:
        chunks = [json.loads(d) for d in re.findall(rb"data: (\{.*?\})\r?\n", data)]
        texts["".join(c["text"] for chunk in chunks for c in chunk["choices"])] += 1
        usage = chunks[-1].get("usage") if chunks else None
        bad += usage is None or usage["completion_tokens"] != n_tokens or b"data: [DONE]" not in data
    return {"streams": len(said), "tokens_each": n_tokens, "bad_ends": bad, "different_texts": len(texts) - 1}


def measure(rate: float, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    others = cores[1:] or cores
    options = {
        "rate": rate,
        "streams": args.streams,
        "core": cores[0],
        "others": ",".join(map(str, others)),
        "kind": "gguf" if args.model else "hf",
        "path": str(args.model or folder),
        "vocab_size": 49152 if args.model else 256,
        "tokens": args.whole or MAX_TOKENS,
    }
    server = subprocess.Popen(
        [sys.executable, __file__, "--server", json.dumps(options)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split("/v1")[0]
        os.sched_setaffinity(0, set(others))
        sockets = open_streams(url, args.streams, options["tokens"])
        if args.whole:
            began_s = time.monotonic()
            said = read_whole(sockets, WHOLE_S)
            took_s = time.monotonic() - began_s
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
            return {
                "asked_per_s": rate,
                **losses(said, args.whole),
                "tokens_per_s": round(args.streams * args.whole / took_s),
                "gateway_peak_mb": round(int(peak[1]) / 1024) if peak else 0,
            }
        read_streams(sockets, WARM_S)
        steps, cpu, began_s = steps_of(url), cpu_s(server.pid), time.monotonic()
        n_events, n_bytes = read_streams(sockets, args.seconds)
        took_s, used_s, steps = time.monotonic() - began_s, cpu_s(server.pid) - cpu, steps_of(url) - steps
        for s in sockets:
            s.close()
    finally:
        os.sched_setaffinity(0, set(cores))
        server.terminate()
        server.wait(20)
    return {
        "asked_per_s": rate,
        "worker_tokens_per_s": round(steps * args.streams / took_s),
        "events_per_s": round(n_events / took_s),
        "gateway_cpu": round(used_s / took_s, 3),
        "events_per_cpu_s": round(n_events / used_s),
        "bytes_per_event": round(n_bytes / max(n_events, 1)),
    }


def steps_of(url: str) -> int:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(f"GET /health/progress HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        data = b""
        while chunk := s.recv(65536):
            data += chunk
    return json.loads(data.partition(b"\r\n\r\n")[2])["step"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="5000,10000,20000,0")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--whole", type=int, default=0, help="tokens of every stream")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker_role(args.worker)
    if args.server:
        return server_role(args.server)
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        results = [measure(float(rate), args, Path(name)) for rate in args.rates.split(",")]
    for row in results:
        print("  ".join(f"{k} {v:>7,}" for k, v in row.items()))
    if args.json:
        machine = read_machine()
        document = {
            "bench": "gateway",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "sha": source_sha(),
            "machine": {"cpu": machine.cpu, "cores": machine.cores, "load_1m": round(os.getloadavg()[0], 1)},
            "python": platform.python_version(),
            "shapes": {"streams": args.streams, "tokenizer": args.model.name if args.model else "byte-level"},
            "seed": None,
            "seconds_per_rate": args.seconds,
            "results": results,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
