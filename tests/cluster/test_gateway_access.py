"""Keys, tenants, salts and the route table."""

import pytest

from kilat.base.errors import AuthError, ConfigError, RequestError
from kilat.cluster.config import ServeConfig, check
from kilat.cluster.gateway.access import OPEN, SCOPES, KeyRing, page_salt, tenant_of
from kilat.cluster.gateway.app import ENDPOINTS
from kilat.cluster.gateway.limits import check_host

pytestmark = pytest.mark.logic

NAMED = "kl_alice_0123456789abcdef"


def test_every_route_has_a_known_scope_and_only_liveness_is_open() -> None:
    assert {e.scope for e in ENDPOINTS} <= set(SCOPES)
    assert [e.path for e in ENDPOINTS if e.scope == OPEN] == ["/health/live"]
    assert len({(e.path, e.method) for e in ENDPOINTS}) == len(ENDPOINTS)


def test_right_key_gives_its_tenant() -> None:
    ring = KeyRing(["first-secret-key", NAMED])
    assert ring.tenant("Bearer first-secret-key") == "key0"
    assert ring.tenant(f"bearer {NAMED}") == "alice"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic first-secret-key",
        "first-secret-key",
        "Bearer wrong",
        "Bearer \udcff",
    ],
)
def test_missing_or_wrong_key_is_refused(header: str | None) -> None:
    with pytest.raises(AuthError) as e:
        KeyRing(["first-secret-key"]).tenant(header)
    assert e.value.status == 401


def test_without_keys_everybody_is_the_nameless_tenant() -> None:
    assert KeyRing([]).tenant(None) == ""
    assert not KeyRing([])


def test_key_ring_keeps_no_key() -> None:
    ring = KeyRing(["first-secret-key"])
    assert "first-secret-key" not in repr(vars(ring))
    assert vars(ring)["_tenants"] != vars(KeyRing(["first-secret-key"]))["_tenants"], (
        "each process has its own pepper"
    )


def test_tenant_name_holds_nothing_of_a_secret() -> None:
    assert tenant_of("some-long-secret", 3) == "key3"
    assert tenant_of(NAMED, 0) == "alice"


def test_salts_of_different_tenants_and_salts_never_meet() -> None:
    salts = [page_salt(t, s) for t in ("", "a", "ab") for s in (None, "b", "bc", "a:b")]
    assert len(set(salts)) == len(salts)
    assert page_salt("", None) == ""


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:8000", "[::1]"]
)
def test_own_host_is_let_in(host: str) -> None:
    check_host(host, "127.0.0.1")


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil"]
)
def test_foreign_host_is_refused(host: str | None) -> None:
    with pytest.raises(RequestError) as e:
        check_host(host, "127.0.0.1")
    assert e.value.status == 421


def config(**options: object) -> ServeConfig:
    return ServeConfig(files=None, engine=None, served_model_name="m", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org", ""])
def test_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        check(config(host=host))
    check(config(host=host, api_keys=("a-long-enough-key",)))


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000},
        {"port": -1},
        {"api_keys": ("short",)},
        {"api_keys": ("with a space in it",)},
        {"api_keys": ("same-key-twice", "same-key-twice")},
        {"drain_s": -1.0},
        {"request_timeout_s": 0.0},
        {"request_timeout_s": float("nan")},
        {"max_failures": 0},
    ],
)
def test_setting_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check(config(**options))
