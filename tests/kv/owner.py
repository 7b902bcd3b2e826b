"""A process that owns pages and offers them; what it does is told on its standard input, one JSON list per line.

    ["open", move id, [pages]]   ["shut", move id]   ["flash", number, seconds]   ["close"]

Each line is answered by one. ``--die N SIGNAL`` sends the signal to itself when its board is asked for the Nth time.
"""

import argparse
import base64
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import TextIO

import numpy as np

from kilat.kv.board import Board
from kilat.kv.shm import ShmTransport
from kilat.kv.tcp import TcpTransport
from kilat.kv.transport import Transport
from tests.kv.pools import SECRET, color, make_pages


class DyingBoard(Board):
    """Kills or stops the process when it is asked for the ``at``-th time whether a move is open."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self._at, self._number = at, number

    def covers(self, move_id: str, pages: Iterable[int]) -> bool:
        self._at -= 1
        if self._at == 0:
            os.kill(os.getpid(), self._number)
            time.sleep(0.2)  # a stopped process stops at its leisure
        return super().covers(move_id, pages)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may say what they like, but not here
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--page-bytes", type=int, default=4096)
    parser.add_argument("--secret", default=SECRET)
    parser.add_argument("--model", default="m")
    parser.add_argument("--nixl", action="store_true")
    parser.add_argument("--die", nargs=2, default=["0", "9"])
    args = parser.parse_args()
    pages = make_pages(args.pages, args.page_bytes, model=args.model, shared=True)
    board = DyingBoard(int(args.die[0]), int(args.die[1]))
    transports: list[Transport] = [
        ShmTransport(pages, board),
        TcpTransport(pages, board, args.secret.encode()),
    ]
    if args.nixl:
        transports.append(importlib.import_module("kilat.kv.nixl").NixlTransport(pages, board))
    ends = {t.kind: base64.b64encode(t.endpoint().address).decode() for t in transports}
    print(json.dumps(ends), file=out, flush=True)
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        if verb == "open":
            board.open(rest[0], rest[1])
        elif verb == "shut":
            board.shut(rest[0])
        elif verb == "flash":
            flash(pages.memory, board, rest[0], rest[1], out)
            continue
        elif verb == "close":
            break
        print("ok", file=out, flush=True)
    for t in transports:
        t.close()
    board.close()
    print("ok", file=out, flush=True)


def flash(memory: np.ndarray, board: Board, k: int, open_s: float, out: TextIO) -> None:
    """Offer page 0 in colour ``k`` for a moment as move ``c<k>``, then write something else over it."""
    memory[0] = color(k, memory.shape[1])
    board.open(f"c{k}", [0])
    print("ok", file=out, flush=True)
    time.sleep(open_s)
    board.shut(f"c{k}")
    memory[0] = color(k + 1, memory.shape[1])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
