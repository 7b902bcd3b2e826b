"""Puts the sources of native/ into the package, beside the modules of kilat.native: an installed kilat builds its kernels from them."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("cpu", "cuda", "include", "runtime", "tools")


class BuildWithSources(build_py):
    """``build_py``, then native/. An editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "kilat", "native")
        for name in FOLDERS:
            # anew each time: a source that an older build left behind would be compiled too
            shutil.rmtree(target / name, ignore_errors=True)
            # not what only a checkout can run
            shutil.copytree(
                Path("native", name),
                target / name,
                ignore=shutil.ignore_patterns("*.sh", "*.py", "__pycache__"),
            )
        shutil.copy2(Path("native", "Makefile"), target)


setup(cmdclass={"build_py": BuildWithSources})
