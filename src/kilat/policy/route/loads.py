"""Loads: what every worker has been given and has not finished, counted where requests are sent and events come in.

A worker's own status is a moment old; a burst of requests within that moment would all see the same idle worker.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Session:
    """``prefill`` works on ``n_tokens`` of prompt until the first token is there; ``decode`` goes on with it."""

    prefill: str
    decode: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions in their prompt, sessions that decode (or will), and prompt tokens that are not computed yet."""

    waiting: int = 0
    running: int = 0
    queued_prompt_tokens: int = 0


class Loads:
    """Live sessions by worker. Calls for unknown sessions are ignored, because events may come after the end. Not thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._loads: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def sent(self, session_id: str, worker: str, decode: str | None, n_tokens: int) -> None:
        """A request goes to ``worker``, which must compute ``n_tokens`` of its prompt; ``decode`` will go on with it (None: the same)."""
        self.ended(session_id)
        session = self._sessions[session_id] = _Session(worker, decode or worker, n_tokens)
        self._add(session, 1)

    def first_token(self, session_id: str) -> None:
        """Its prompt is computed. Further calls change nothing."""
        session = self._sessions.get(session_id)
        if session is not None and session.prefill:
            self._add(session, -1)
            session.prefill = ""
            self._add(session, 1)

    def ended(self, session_id: str) -> None:
        """It has finished, failed or was cancelled."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._add(session, -1)

    def of(self, worker_id: str) -> Load:
        return self._loads.get(worker_id, Load())

    def _add(self, s: _Session, sign: int) -> None:
        # a session that still has its prompt before it counts where it will decode too: that place is taken
        if s.prefill:
            load = self.of(s.prefill)
            self._set(
                s.prefill, load.waiting + sign, load.running, load.queued_prompt_tokens + sign * s.n_tokens
            )
        if not s.prefill or s.decode != s.prefill:
            load = self.of(s.decode)
            self._set(s.decode, load.waiting, load.running + sign, load.queued_prompt_tokens)

    def _set(self, worker_id: str, waiting: int, running: int, tokens: int) -> None:
        if waiting or running:
            self._loads[worker_id] = Load(waiting, running, tokens)
        else:
            self._loads.pop(worker_id, None)
