"""Why the beginning of a prompt was, or was not, taken from pages that existed: kept for the latest requests. Pure."""

from collections import OrderedDict
from typing import Any

from kilat.cluster.gateway.trip import Trip
from kilat.policy.route.views import Route
from kilat.wire.messages import Recalled, SessionEvent

KEPT = 1024


class Explanations:
    """What is known of the latest sessions, by session id, and which sessions a request has. Bounded."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._sessions: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._requests: OrderedDict[str, tuple[str, list[str]]] = OrderedDict()

    def request(self, request_id: str, tenant: str, session_ids: list[str]) -> None:
        """A request of a tenant has these sessions."""
        self._requests[request_id] = (tenant, session_ids)
        while len(self._requests) > self._kept:
            self._requests.popitem(last=False)

    def routed(self, trip: Trip, route: Route, worker_names: dict[str, str]) -> None:
        """A session was given to workers; their names are told instead of their ids."""
        told = self._sessions.get(trip.record.session_id)
        if told is None:
            if trip.record.branch > 0:
                return
            told = {
                "prompt_tokens": len(trip.record.prompt_ids),
                "cached_tokens": None,
                "routes": [],
                "recalled": [],
            }
            self._sessions[trip.record.session_id] = told
            while len(self._sessions) > self._kept:
                self._sessions.popitem(last=False)
        told["routes"].append(
            {
                "worker": route.worker,
                "decode": route.decode,
                "lend_from": route.lend_from,
                "lent_pages": route.n_lent,
                "tokens_known": trip.n_tokens,
                "why": route.why,
                "names": worker_names,
            }
        )

    def recalled(self, message: Recalled, worker_name: str) -> None:
        """Pages for a session came back from a tier of the worker that has it."""
        told = self._sessions.get(message.session_id)
        if told is not None:
            told["recalled"].append({"worker": worker_name, "pages": message.pages, "bytes": message.n_bytes})

    def begun(self, trip: Trip, event: SessionEvent) -> None:
        """The first event of a session says how much of its prompt was found."""
        told = self._sessions.get(trip.record.session_id)
        if told is not None and told["cached_tokens"] is None:
            told["cached_tokens"] = event.cached_tokens

    def of(self, request_id: str, tenant: str) -> dict[str, Any] | None:
        """All that is known of a request; None when it is not known, or is another tenant's."""
        owner, session_ids = self._requests.get(request_id, (None, []))
        if owner != tenant:
            return None
        return {"id": request_id, "prompts": [_told(self._sessions.get(s)) for s in session_ids]}


def _told(session: dict[str, Any] | None) -> dict[str, Any]:
    if session is None:
        return {"routes": []}
    return {**session, "routes": [_named(dict(route)) for route in session["routes"]]}


def _named(route: dict[str, Any]) -> dict[str, Any]:
    """Worker ids, wherever they stand, become the names that people know."""
    names: dict[str, str] = route.pop("names")

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            for worker_id, name in names.items():
                value = value.replace(worker_id, name)
            return value
        if isinstance(value, dict):
            return {renamed(k): renamed(v) for k, v in value.items()}
        return [renamed(v) for v in value] if isinstance(value, list) else value

    return {key: renamed(value) for key, value in route.items()}
