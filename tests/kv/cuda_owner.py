"""A process that owns pages on a CUDA device: ``python -m tests.kv.cuda_owner N_PAGES PAGE_BYTES``.

Page ``p`` is filled with the number ``p``. It tells its endpoint, then takes lines: ``["open", move, pages]``, ``["shut", move]``.
"""

import base64
import json
import sys

import torch

from kilat.kv.board import Board
from kilat.kv.cuda_copy import copy_pages
from kilat.kv.cuda_ipc import CudaIpcTransport
from tests.kv.pools import make_layout


def main() -> None:
    n, page_bytes = int(sys.argv[1]), int(sys.argv[2])
    view = torch.empty((n, page_bytes), dtype=torch.uint8, device="cuda")
    view.view(torch.int64)[:] = torch.arange(n, device="cuda")[:, None]
    torch.cuda.synchronize()
    board = Board()
    transport = CudaIpcTransport(make_layout(page_bytes), view, board, copy_pages)
    print(json.dumps({"cuda_ipc": base64.b64encode(transport.endpoint().address).decode()}), flush=True)
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        if verb == "open":
            board.open(rest[0], rest[1])
        else:
            board.shut(rest[0])
        print("ok", flush=True)


if __name__ == "__main__":
    main()
