"""Gets a model from the Hugging Face hub into the hub library's own cache. Only text and safetensors files are asked for."""

from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download

from kilat.base.errors import SourceError

# Weights in other formats can run code when they are read, so they are not even downloaded.
_WANTED: Final = ("*.safetensors", "*.json", "*.jinja")
# Folders hold other formats of the same weights; "consolidated" is a second copy under other names.
_UNWANTED: Final = ("*/*", "consolidated*")


def snapshot(hub_id: str) -> Path:
    """Directory of the newest revision of ``owner/name`` (or of the cached one when there is no network); raises SourceError.

    The hub library shows its own progress bars, resumes, and takes its token and endpoint from its own settings.
    """
    try:
        directory = Path(
            snapshot_download(
                hub_id, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED), etag_timeout=5
            )
        )
    # The library lets errors of its transport through, and that transport has changed between its versions.
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise SourceError(
            f"{hub_id} could not be fetched from the Hugging Face hub ({type(error).__name__}: {lines[0] if lines else ''}): check "
            "the name, the network and, for gated models, your token; or give a local directory"
        ) from error
    if not (directory / "config.json").is_file():
        raise SourceError(f"{hub_id} has no config.json on the hub: it is not a model that kilat can read")
    return directory
