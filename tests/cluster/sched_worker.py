"""A worker process with pages but without a model: ``python sched_worker.py CONFIG.json``. Only tests start it."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    sys.path.insert(0, str(ROOT))  # its engine uses the fakes of the scheduler's tests
    from sched_engine import SchedEngine

    from kilat.cluster.worker.main import run_worker

    return run_worker(Path(sys.argv[1]), lambda raw: SchedEngine(**json.loads(raw)))


if __name__ == "__main__":
    sys.exit(main())
