"""The gateway's end of the socket to the worker.

One ZeroMQ ROUTER on a local socket in a private folder. A frame from a worker is (its id, the shared secret, one message); frames with
a wrong secret, of another incarnation of the worker, or that do not decode are counted and dropped. A worker's id is new each time it
is started, so what an older one still says reaches nobody. Everything here runs on the event loop's thread.
"""

import asyncio
import hmac
import time
from collections.abc import Callable

import zmq

from kilat.base.errors import CapacityError, KilatError, PeerError
from kilat.base.ids import branch_id
from kilat.base.log import event, get_logger
from kilat.cluster.gateway.errors import from_peer
from kilat.cluster.gateway.sessions import Inbox, SessionTable
from kilat.wire import PROTOCOL_VERSION, codec
from kilat.wire.messages import (
    Abort,
    Drain,
    Fatal,
    FromWorker,
    Hello,
    Refused,
    Status,
    StepEvents,
    Submit,
    ToWorker,
)
from kilat.wire.session import SessionRecord

BEAT_SUFFIX = b".beat"
FRAMES_PER_WAKE = 64

_log = get_logger("link")


class WorkerLink:
    """Sends messages to the one worker and routes what it says. ``hello`` is None until the current worker is ready."""

    def __init__(self, address: str, secret: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.table = SessionTable()
        self.hello: Hello | None = None
        self.status: Status | None = None
        self.heard_at_s = clock()
        self.fatal: str | None = None
        self.bad_frames = 0
        self.on_ready: Callable[[Hello], None] = lambda hello: None
        self._clock = clock
        self._secret = secret.encode()
        self._expected = b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by max_requests and the context length instead
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1

    def open(self) -> None:
        """Bind, and read from now on in the running event loop."""
        self._socket.bind(self.address)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Unbind; sessions that still wait end with an error. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
            self.lost(PeerError("the server stopped; send the request again"))
            self._socket.close()
            self._context.term()

    @property
    def ready(self) -> bool:
        """A worker is there and takes sessions."""
        return self.hello is not None and not (self.status is not None and self.status.draining)

    def expect(self, worker_id: str) -> None:
        """From now on only the worker with this id is listened to."""
        self._expected = worker_id.encode()
        self.hello = self.status = self.fatal = None

    def lost(self, error: KilatError) -> None:
        """The current worker is gone: all its sessions end with ``error``."""
        self._expected = b""
        self.hello = self.status = None
        self.table.fail_all(error)

    def submit(self, record: SessionRecord, inbox: Inbox, branches: list[str], first_index: int) -> None:
        """Run a session; events of ``branches[k]`` go to ``inbox`` as sample ``first_index + k``.

        Raises CapacityError when no worker takes sessions, PeerError when its socket does not take the message.
        """
        if not self.ready:
            raise CapacityError("the model is not ready yet or is going away: try again soon", status=503)
        for k, branch in enumerate(branches):
            self.table.add(branch, inbox, first_index + k, record.epoch)
        try:
            self._send(Submit(record))
        except PeerError:
            for branch in branches:
                self.table.remove(branch)
            raise

    def stop_sample(self, session_id: str, k: int, n: int) -> None:
        """Stop sample ``k`` of ``n`` and forget it. Never raises, for a worker that is gone runs nothing."""
        branch = branch_id(session_id, k)
        self.table.remove(branch)
        # The id alone would stop all samples.
        self._send_if_there(Abort([f"{session_id}#0" if k == 0 and n > 1 else branch]))

    def release(self, session_ids: list[str], n: int) -> None:
        """Forget these sessions and stop what still runs of their ``n`` samples. Idempotent; never raises."""
        running = [s for s in session_ids if sum(self.table.remove(branch_id(s, k)) for k in range(n))]
        if running:
            self._send_if_there(Abort(running))

    def drain(self, deadline_s: float) -> None:
        """Ask the worker to end; never raises."""
        self._send_if_there(Drain(deadline_s))

    def _send_if_there(self, message: ToWorker) -> None:
        if self.hello is not None:
            try:
                self._send(message)
            except PeerError as e:
                _log.warning("%s", e.message)

    def _send(self, message: ToWorker) -> None:
        try:
            self._socket.send_multipart((self._expected, codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as e:
            raise PeerError(f"the worker could not be reached ({e.strerror}); send the request again") from e
        # The descriptor signals edges: what arrived while we sent would not be announced again.
        if self._loop is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(FRAMES_PER_WAKE):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_parts(parts)
        if self._loop is not None:
            self._loop.call_soon(self._read)

    def _on_parts(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or not hmac.compare_digest(parts[1], self._secret):
            self.bad_frames += 1
            return
        sender = parts[0].removesuffix(BEAT_SUFFIX)
        if not self._expected or sender != self._expected:
            return  # an older worker's last words
        try:
            message = codec.decode_from_worker(parts[2])
        except PeerError as e:
            self.bad_frames += 1
            _log.warning("%s", e.message)
            return
        self.heard_at_s = self._clock()
        self._on_message(message)

    def _on_message(self, message: FromWorker) -> None:
        if isinstance(message, StepEvents):
            cut = self.table.deliver(message.events)
            if cut:
                self._send_if_there(Abort(cut))
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Refused):
            error = from_peer(message.code, message.message, status=message.status, param=message.param)
            if isinstance(error, CapacityError):
                error.retry_after_s = message.retry_after_s
            self.table.refuse(message.session_id, error)
        elif isinstance(message, Hello):
            self._on_hello(message)
        elif isinstance(message, Fatal):
            self.fatal = message.message
            event(_log, "worker_fatal", reason=repr(message.message))

    def _on_hello(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            self.fatal = f"the worker speaks protocol {hello.protocol}, this gateway {PROTOCOL_VERSION}"
            _log.error("%s", self.fatal)
            return
        self.hello = hello
        self.on_ready(hello)
