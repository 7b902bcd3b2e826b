"""``serve`` with the fake engine: ``python serve_fake.py OPTIONS.json``. Options: model_path, engine (FakeSettings), and ServeConfig's."""

import json
import sys
from pathlib import Path

from fake_engine import FakeSettings
from tiny_model import TinyFiles

from kilat.base.log import setup
from kilat.cluster.config import ServeConfig
from kilat.cluster.launch import serve

if __name__ == "__main__":
    setup("gateway")
    options = json.loads(Path(sys.argv[1]).read_text())
    config = ServeConfig(
        files=TinyFiles(Path(options.pop("model_path"))),
        engine=FakeSettings(**options.pop("engine", {})),
        served_model_name="tiny",
        port=options.pop("port", 0),
        api_keys=tuple(options.pop("api_keys", ())),
        **options,
    )
    sys.exit(serve(config, worker_command=(sys.executable, str(Path(__file__).with_name("fake_worker.py")))))
