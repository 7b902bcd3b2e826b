"""A worker's sockets to the gateway. Every message goes out with the shared secret, so the gateway can drop everybody else's."""

import zmq

from kilat.base.errors import PeerError
from kilat.base.log import get_logger
from kilat.cluster.secure import protect_client
from kilat.wire import codec
from kilat.wire.messages import FromWorker, ToWorker

LINGER_MS = 2000

_log = get_logger("worker")


class Channel:
    """One DEALER socket. A socket belongs to one thread, so the loop and the beat have one each, told apart by ``suffix``."""

    def __init__(self, address: str, secret: str, worker_id: str, *, suffix: str = "") -> None:
        self._secret = secret.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, (worker_id + suffix).encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(
            zmq.SNDHWM, 0
        )  # what running sessions can say is bounded; dropping a token is not an option
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
        # A message that was under way when a connection broke is lost, and nobody knows which: this is for good.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        protect_client(self._socket, address, secret)
        self._socket.connect(address)

    def send(self, message: FromWorker) -> None:
        """Queue one message; does not wait for the gateway."""
        self._socket.send_multipart((self._secret, codec.encode(message)))

    def receive(self, timeout_s: float) -> list[ToWorker]:
        """All messages that are there; waits up to ``timeout_s`` for the first. Frames that do not decode are logged and dropped. Raises
        PeerError when the connection has been lost."""
        messages: list[ToWorker] = []
        if timeout_s > 0 and not self._poller.poll(round(timeout_s * 1000)):
            return []
        if self._monitor.poll(0):
            # it would connect again, and say what came after the message that was lost
            self._socket.setsockopt(zmq.LINGER, 0)
            raise PeerError("the connection to the gateway is lost")
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(codec.decode_to_worker(parts[-1]))
            except PeerError as e:
                _log.warning("%s", e.message)

    def close(self) -> None:
        """Send what is queued, for at most :data:`LINGER_MS` and not when the connection was lost, then close."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
