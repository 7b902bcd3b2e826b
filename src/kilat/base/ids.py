"""Identifiers: unguessable, printable, with a prefix that says what they name."""

import secrets


def new_session_id() -> str:
    """Id of one running request; a sample of an ``n > 1`` request is ``<id>#<k>``."""
    return "ses-" + secrets.token_hex(12)


def branch_id(session_id: str, k: int) -> str:
    """Id of sample ``k`` of a request. Sample 0 keeps the request's own id."""
    return session_id if k == 0 else f"{session_id}#{k}"


def new_seed() -> int:
    """A random 63-bit seed, for requests that name none, so that they too can be resumed exactly."""
    return secrets.randbits(63)
