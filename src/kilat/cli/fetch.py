"""From a model's name to its files, with a progress bar; or only when they are on this disk already.

What downloads is imported when there is something to download: those imports take longer than a small model's first token.
"""

from kilat.base.env import cache_dir
from kilat.base.errors import SourceError
from kilat.cli.text import n_bytes_text
from kilat.load import catalogue
from kilat.load.files import ModelFiles
from kilat.load.local import find_local


def fetch(name: str) -> ModelFiles:
    """The model's files, downloaded if need be. Raises SourceError."""
    return find_local(name) or _download(name)


def find(name: str) -> ModelFiles:
    """The files of a model that needs no download from the catalogue. Raises SourceError that says how to get
    it.
    """
    model = catalogue.find(name)
    if model is not None and not catalogue.is_cached(model, cache_dir()):
        size = n_bytes_text(model.n_bytes)
        raise SourceError(f"{name} ({size}) is not on this disk: `kilat model pull {name}` downloads it")
    return fetch(name)


def _download(name: str) -> ModelFiles:
    from kilat.cli.progress import TransferBar
    from kilat.load.sources import resolve

    with TransferBar() as bar:
        return resolve(name, bar)
