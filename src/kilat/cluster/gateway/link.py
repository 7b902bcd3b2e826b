"""The gateway's end of the sockets to its workers.

One ZeroMQ ROUTER on a local socket in a private folder, or on TCP (see ``secure``) for workers of other hosts. A frame from a worker is
(its id, the shared secret, one message); frames with a wrong secret, of a worker that is not expected, or that do not decode are
counted and dropped. A worker's id is new each time it is started, so what an older one still says reaches nobody; it is told to end.
Everything here runs on the event loop's thread.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable

import zmq

from kilat.base.errors import ConfigError, PeerError
from kilat.base.log import get_logger
from kilat.cluster.secure import protect_server
from kilat.wire import codec
from kilat.wire.messages import Drain, FromWorker, ToWorker

BEAT_SUFFIX = b".beat"
FRAMES_PER_WAKE = 64

_log = get_logger("link")


class WorkerLinks:
    """Sends messages to workers by id, and hands what expected workers say to ``on_message(worker_id, message)``."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self.bad_frames = 0
        self.on_message: Callable[[str, FromWorker], None] = lambda worker_id, message: None
        self._secret = secret.encode()
        self._expected: dict[bytes, str] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by max_requests and the context length instead
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        protect_server(self._socket, address, secret)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1

    def open(self) -> None:
        """Bind, and read from now on in the running event loop. ``address`` has the port then. Raises ConfigError."""
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as e:
            raise ConfigError(
                f"workers cannot be listened to on {self.address} ({e.strerror}): it must be an address of this host"
            ) from e
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Unbind. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
            self._socket.close()
            self._context.term()

    def expect(self, worker_id: str) -> None:
        """From now on this worker is listened to."""
        self._expected[worker_id.encode()] = worker_id

    def forget(self, worker_id: str) -> None:
        """This worker is gone: what is still on its way from it is dropped. Idempotent."""
        self._expected.pop(worker_id.encode(), None)

    def send(self, worker_id: str, message: ToWorker) -> None:
        """Queue one message. One that cannot be reached is only logged: it is dead, which its supervisor finds out at once."""
        try:
            self._socket.send_multipart((worker_id.encode(), codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as e:
            # to the last worker of a server that ends, the news that another has left is sent too late as often as not
            level = logging.DEBUG if e.errno == zmq.EHOSTUNREACH else logging.WARNING
            _log.log(
                level,
                "%s could not be sent to %s (%s)",
                type(message).__name__,
                worker_id,
                zmq.strerror(e.errno or 0),
            )
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
        worker_id = self._expected.get(parts[0].removesuffix(BEAT_SUFFIX))
        if worker_id is None:
            if parts[0].endswith(
                BEAT_SUFFIX
            ):  # an older worker; one that was taken for dead wrongly would stay
                self.send(parts[0].removesuffix(BEAT_SUFFIX).decode(errors="replace"), Drain(0.0))
            return
        try:
            message = codec.decode_from_worker(parts[2])
        except PeerError as e:
            self.bad_frames += 1
            _log.warning("%s", e.message)
            return
        self.on_message(worker_id, message)
