"""The runtime is built once; where that is not possible its tests are skipped with the reason."""

import pytest

from kilat.base.errors import ConfigError
from kilat.native import library


@pytest.fixture(scope="session")
def runtime() -> None:
    """Asked for by every test that calls the runtime."""
    try:
        library.load()
    except ConfigError as error:
        pytest.skip(error.message)
