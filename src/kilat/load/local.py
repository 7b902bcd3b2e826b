"""Models that are on this disk already. Imports nothing that can download, so a command on a local file starts quickly."""

from pathlib import Path

from kilat.base.env import cache_dir
from kilat.base.errors import SourceError
from kilat.load import catalogue
from kilat.load.files import ModelFiles


def find_local(name: str) -> ModelFiles | None:
    """Files of the model called ``name`` when they are in the cache or at a path, else None; raises SourceError for a path that is
    no model. A name of the catalogue is never a path.
    """
    model = catalogue.find(name)
    if model is not None:
        path = catalogue.cached_path(model, cache_dir())
        return ModelFiles("gguf", path, name) if catalogue.is_cached(model, cache_dir()) else None
    path = Path(name).expanduser()
    return _at(path.resolve()) if _exists(path) else None


def _at(path: Path) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceError(
                f"directory {path.name} has no config.json: give a Hugging Face model directory"
            )
        return ModelFiles("hf", path, path.name)
    if not path.is_file() or path.suffix != ".gguf":
        raise SourceError(
            f"{path.name} is not a model: give a .gguf file or a directory with config.json and safetensors. Weights in other "
            "formats (.bin, .pt) can run code when they are read and are not loaded"
        )
    return ModelFiles("gguf", path, path.stem)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False
