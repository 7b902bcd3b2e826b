"""Run as a script: what the runtime reports and what the system shows, as JSON. A process of its own, so that nothing else moves."""

import gc
import json
import sys
from pathlib import Path

from kilat.native import library
from kilat.native.runtime import NativeModel, Sampling


def private_bytes() -> int:
    """Anonymous memory of this process that is in RAM."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous line")


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def main() -> None:
    path, weights, context = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    library.load()
    gc.collect()
    gc.disable()
    before = private_bytes()
    model = NativeModel(path, threads=2, weights=weights)
    session = model.session(context)
    reported = sum(o.host_bytes for o in model.memory(session))
    ready, ready_mapped = private_bytes(), mapped_bytes()
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9)
    for n in (1, 5, 100, context - 40):
        session.rewind(0)
        token = session.prefill(list(range(1, n + 1)), sampling)
        for _ in range(20):
            token = session.step(token, sampling)
    used, used_mapped = private_bytes(), mapped_bytes()
    print(
        json.dumps(
            {
                "reported": reported,
                "shown": ready - before,
                "grown": used - ready,
                "mapped": used_mapped - ready_mapped,
            }
        )
    )


if __name__ == "__main__":
    main()
