"""The error tree: what its docstring draws is what there is, and clients can rely on status, code and retryable."""

import re

import pytest

from kilat.base import errors
from kilat.base.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    EngineError,
    KilatError,
    LimitError,
    ModelFileError,
    NotFoundError,
    PeerError,
    RequestError,
    SourceError,
)

pytestmark = pytest.mark.logic

# class, its parent, status, retryable, code
TREE: list[tuple[type[KilatError], type, int, bool, str]] = [
    (KilatError, Exception, 500, False, "internal_error"),
    (RequestError, KilatError, 400, False, "invalid_request"),
    (LimitError, RequestError, 400, False, "limit_exceeded"),
    (NotFoundError, RequestError, 404, False, "not_found"),
    (AuthError, RequestError, 401, False, "invalid_api_key"),
    (CapacityError, KilatError, 429, True, "overloaded"),
    (ConfigError, KilatError, 500, False, "bad_config"),
    (ModelFileError, KilatError, 500, False, "bad_model_file"),
    (SourceError, KilatError, 500, False, "model_source"),
    (PeerError, KilatError, 503, True, "peer_failed"),
    (EngineError, KilatError, 500, False, "engine_failed"),
]
KINDS = [kind for kind, *_ in TREE]


def defined() -> set[type]:
    return {x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, BaseException)}


def drawn() -> dict[str, int]:
    """The names in the docstring's drawing, and how deep each stands."""
    lines = re.findall(r"^ {4}([\u2500-\u257f ]*)([A-Z]\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    return {name: len(branches) // 4 for branches, name in lines}


@pytest.mark.parametrize(("kind", "parent", "status", "retryable", "code"), TREE)
def test_error_has_its_place_and_its_answer(
    kind: type[KilatError], parent: type, status: int, retryable: bool, code: str
) -> None:
    error = kind("too much")
    assert kind.__bases__ == (parent,)
    assert (error.status, error.retryable, error.code) == (status, retryable, code)
    assert error.message == str(error) == "too much"
    assert error.param is None
    assert kind.__doc__


def test_drawing_shows_every_class_and_nothing_else() -> None:
    assert set(drawn()) == {kind.__name__ for kind in defined()} == {kind.__name__ for kind in KINDS}


def test_drawing_shows_who_inherits_from_whom() -> None:
    for name, depth in drawn().items():
        assert getattr(errors, name).__mro__.index(KilatError) == depth


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


def test_only_what_may_work_later_is_retryable_and_no_fault_of_the_client_is() -> None:
    assert {kind for kind in KINDS if kind.retryable} == {CapacityError, PeerError}
    assert all(400 <= kind.status < 500 for kind in KINDS if issubclass(kind, RequestError))
    assert all(
        kind.status >= 500
        for kind in KINDS
        if kind.__bases__ == (KilatError,) and not kind.retryable and kind is not RequestError
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not CapacityError])
def test_error_can_name_the_field_and_a_finer_code(kind: type[KilatError]) -> None:
    error = kind("no", param="prompt", code="finer")
    assert (error.param, error.code) == ("prompt", "finer")
    assert kind.code != "finer" and kind("no").code == kind.code


def test_status_of_one_error_is_not_that_of_its_class() -> None:
    error = RequestError("no")
    error.status = 418
    assert RequestError.status == RequestError("no").status == 400


def test_full_server_says_when_to_come_back() -> None:
    assert (CapacityError("full").retry_after_s, CapacityError("full").status) == (1.0, 429)
    draining = CapacityError("draining", retry_after_s=5.0, status=503)
    assert (draining.retry_after_s, draining.status, draining.retryable) == (5.0, 503, True)
    assert CapacityError("full").status == CapacityError.status == 429


def test_one_except_clause_catches_all_of_them_and_no_bug() -> None:
    for kind in KINDS:
        with pytest.raises(KilatError):
            raise kind("x")
    assert not any(issubclass(bug, KilatError) for bug in (ValueError, KeyError, OSError, AssertionError))


def test_cause_is_kept() -> None:
    with pytest.raises(PeerError) as caught:
        try:
            raise ValueError("deep")
        except ValueError as e:
            raise PeerError("a frame could not be read") from e
    assert isinstance(caught.value.__cause__, ValueError)
