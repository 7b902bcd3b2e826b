"""The gateway side runs where torch is not installed, and starts quickly where it is."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.cluster

MODULES = (
    "kilat.cluster.config",
    "kilat.cluster.launch",
    "kilat.cluster.supervise",
    "kilat.cluster.gateway.app",
    "kilat.cluster.gateway.fleet",
    "kilat.cluster.worker.main",
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_where_torch_is_blocked(module: str) -> None:
    # The worker looks at its pages as arrays; the gateway's side needs no numpy either.
    blocked = ["torch"] if ".worker." in module else ["torch", "numpy"]
    run(f"""
        import sys
        sys.modules.update(dict.fromkeys({blocked}))
        import {module}
    """)


@pytest.mark.parametrize("module", MODULES)
def test_module_does_not_bring_the_engine_in(module: str) -> None:
    found = run(f"""
        import sys
        import {module}
        print([m for m in sys.modules if m.split(".")[0] in ("torch", "transformers") or m.startswith("kilat.engine")])
    """)
    assert found.strip() == "[]"
