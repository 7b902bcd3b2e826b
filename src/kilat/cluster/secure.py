"""CurveZMQ for sockets between hosts: what is sent is encrypted, and the worker knows that the gateway is the one it was started by.

The gateway's key pair follows from the deployment's secret, which both ends have. That a worker has it too, it shows with every message
(see ``gateway/link``). Sockets of one host are files in a private folder and need none of this.
"""

import hashlib

import zmq
from zmq.utils import z85

from kilat.base.errors import ConfigError

HEARTBEAT_MS = 1000
DEAD_MS = 10_000


def protect_server(socket: "zmq.Socket[bytes]", address: str, secret: str) -> None:
    """Before binding. Raises ConfigError when the ZeroMQ here cannot encrypt."""
    if _between_hosts(socket, address):
        socket.curve_server = True
        socket.curve_secretkey = _secret_key(secret)


def protect_client(socket: "zmq.Socket[bytes]", address: str, secret: str) -> None:
    """Before connecting. Raises ConfigError when the ZeroMQ here cannot encrypt."""
    if _between_hosts(socket, address):
        socket.curve_serverkey = zmq.curve_public(_secret_key(secret))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _between_hosts(socket: "zmq.Socket[bytes]", address: str) -> bool:
    if not address.startswith("tcp:"):
        return False
    if not zmq.has("curve"):
        raise ConfigError(
            "this ZeroMQ was built without CURVE, so no workers on other hosts: install the pyzmq wheel"
        )
    # A host that is gone closes no socket.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_MS)
    return True


def _secret_key(secret: str) -> bytes:
    return z85.encode(hashlib.blake2b(secret.encode(), digest_size=32, person=b"kilat gateway").digest())
