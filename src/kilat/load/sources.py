"""From what a user calls a model to its files: a directory, a .gguf file, a catalogue name or a hub id. Needs no torch."""

import difflib
import re
from dataclasses import dataclass
from typing import Final

from kilat.base.env import cache_dir
from kilat.base.errors import SourceError
from kilat.load import catalogue as packages
from kilat.load.download import Progress
from kilat.load.files import ModelFiles
from kilat.load.hub import snapshot
from kilat.load.local import find_local
from kilat.load.package_models import pull

_HUB_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Listing:
    """One catalogue model: size and hash of its GGUF file, the packages it comes in, and whether it is on disk."""

    name: str
    title: str
    license: str
    n_bytes: int
    sha256: str
    packages: tuple[str, ...]
    cached: bool


class _Silent:
    """A :class:`Progress` that shows nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        pass

    def advance(self, n_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass


def resolve(name: str, progress: Progress | None = None) -> ModelFiles:
    """Files of the model called ``name``, downloaded into the cache when they are not on disk; raises SourceError.

    Tried in this order: a name of the catalogue, a path that exists, a hub id ``owner/name``.
    """
    found = find_local(name)
    if found is not None:
        return found
    model = packages.find(name)
    if model is not None:
        return ModelFiles("gguf", pull(model, cache_dir(), progress or _Silent()), name)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return ModelFiles("hf", snapshot(name), name)
    raise SourceError(_nothing(name))


def _nothing(name: str) -> str:
    """What to say of a name that nothing has."""
    names = [model.name for model in packages.CATALOGUE]
    want = f"a model directory, a .gguf file, a hub id like owner/name, or one of {', '.join(names)}"
    if "/" in name or name.endswith(".gguf"):
        return f"there is no file or folder {name[:200]!r}: check the path, or give {want}"
    near = difflib.get_close_matches(name[:200], names, n=1)
    meant = f"did you mean {near[0]}? Else " if near else ""
    return f"no model {name[:200]!r} on disk or in the catalogue: {meant}give {want}"


def catalogue() -> list[Listing]:
    """The models that can be had by name, and which of them are on disk."""
    return [
        Listing(
            model.name,
            model.title,
            model.license,
            model.n_bytes,
            model.sha256,
            tuple(f"{wheel.package}=={wheel.version}" for wheel in model.wheels),
            packages.is_cached(model, cache_dir()),
        )
        for model in packages.CATALOGUE
    ]
