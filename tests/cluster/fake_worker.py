"""A worker process with the fake engine: ``python fake_worker.py CONFIG.json``. Only tests start it."""

import sys
from pathlib import Path

from fake_engine import make_fake_engine

from kilat.cluster.worker.main import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(Path(sys.argv[1]), make_fake_engine))
