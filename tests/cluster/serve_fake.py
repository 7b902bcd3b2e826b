"""``serve`` with the fake engine: ``python serve_fake.py OPTIONS.json``. Options: model_path, engine (FakeSettings), and ServeConfig's.

``script``: another worker than the fake one, with ``engine`` as its settings.
``engine`` {"sched": {...}}: workers whose tokens are read back from real pages (SchedEngine), which move between them.
"""

import json
import sys
from pathlib import Path

from fake_engine import FakeSettings
from tiny_model import TinyFiles

from kilat.base.log import setup
from kilat.cluster.config import RayConfig, ServeConfig
from kilat.cluster.launch import serve

if __name__ == "__main__":
    setup("gateway")
    options = json.loads(Path(sys.argv[1]).read_text())
    engine = options.pop("engine", {})
    script = options.pop("script", "fake_worker.py")
    if script != "fake_worker.py":
        settings = engine
    elif "sched" in engine:
        script, settings = "sched_worker.py", engine["sched"]
    else:
        settings = FakeSettings(**engine)
        options["transports"] = ()  # it has no pages
    ray = options.pop("ray", None)
    config = ServeConfig(
        ray=RayConfig(**ray) if ray else None,
        files=TinyFiles(Path(options.pop("model_path"))),
        engine=settings,
        served_model_name="tiny",
        port=options.pop("port", 0),
        api_keys=tuple(options.pop("api_keys", ())),
        **options,
    )
    sys.exit(serve(config, worker_command=(sys.executable, str(Path(__file__).with_name(script)))))
