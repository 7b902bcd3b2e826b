"""From a model's name to its files, with a progress bar; or only when they are on this disk already."""

from kilat.base.errors import SourceError
from kilat.cli.progress import TransferBar
from kilat.cli.text import n_bytes_text
from kilat.load.files import ModelFiles
from kilat.load.sources import catalogue, resolve


def fetch(name: str) -> ModelFiles:
    """The model's files, downloaded if need be. Raises SourceError."""
    with TransferBar() as bar:
        return resolve(name, bar)


def find(name: str) -> ModelFiles:
    """The files of a model that needs no download from the catalogue. Raises SourceError that says how to get
    it.
    """
    entry = next((e for e in catalogue() if e.name == name), None)
    if entry is not None and not entry.cached:
        size = n_bytes_text(entry.n_bytes)
        raise SourceError(f"{name} ({size}) is not on this disk: `kilat model pull {name}` downloads it")
    return fetch(name)
