"""Who may do what: one table names every route with its scope; keys are kept as keyed hashes."""

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

from kilat.base.errors import AuthError

OPEN = "open"
INFER = "infer"
OBSERVE = "observe"
ADMIN = "admin"
SCOPES = (OPEN, INFER, OBSERVE, ADMIN)

_NAMED_KEY = re.compile(r"kl_([A-Za-z0-9-]{1,32})_.{16,}")


class Endpoint(NamedTuple):
    """One line of the route table. ``scope`` OPEN needs no key; a key opens every other scope of this server."""

    path: str
    method: str
    scope: str
    handler: Callable[[Request], Awaitable[ASGIApp]]


class KeyRing:
    """The API keys of this server. Only keyed hashes stay in memory; the pepper is new in each process."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._tenants = [(self._digest(key), tenant_of(key, i)) for i, key in enumerate(keys)]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str:
        """The tenant that an Authorization header belongs to; "" when this server has no keys. Raises AuthError."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthError(
                "this server needs an API key: send the header Authorization: Bearer <key>",
                code="missing_api_key",
            )
        digest = self._digest(key.strip())
        found = [name for known, name in self._tenants if hmac.compare_digest(known, digest)]
        if not found:
            raise AuthError("the API key is not known here: check the Authorization header")
        return found[0]

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode("utf-8", "surrogateescape"), key=self._pepper).digest()


def tenant_of(key: str, position: int) -> str:
    """The tenant of a key: ``<name>`` of ``kl_<name>_<secret>``, else its place in the list. Holds nothing of the secret."""
    named = _NAMED_KEY.fullmatch(key)
    return named.group(1) if named else f"key{position}"


def page_salt(tenant: str, cache_salt: str | None) -> str:
    """Salt of a session's page hashes, so that neither another tenant nor another ``cache_salt`` can share or time its pages."""
    return f"{len(tenant)}:{tenant}:{cache_salt or ''}" if tenant or cache_salt else ""
