"""What goes over a page connection: the handshake, length-checked frames, and page bytes straight from and into the pools.

    server                         client
    MAGIC nonce                ->
                               <-  MAGIC nonce proof          proof = HMAC-SHA256(secret, role, both nonces, life, layout)
    proof                      ->
                               <-  frame Ask(move, pages)
    frame Reply(checksums) page bytes ... ->                  one Reply before each batch of pages and one after the last

A Reply says that the move was open when the bytes before it were sent. Both sides prove that they know the deployment's secret; ``life``
is the nonce of the owner's board. Bytes are not encrypted.
"""

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kilat.base.errors import PeerError

MAGIC = b"kilatkv1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_FRAME_BYTES = 4 << 20
SLICE_S = 0.02
"""A waiting thread looks this often whether it is to stop."""
_SLICE = struct.pack("@ll", 0, round(SLICE_S * 1e6))  # a timeval
_IOV_MAX = 512

_T = TypeVar("_T")

Check = Callable[[], float]
"""Seconds that are left; raises PeerError when the wait is over."""


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Client: send these pages of this move."""

    move_id: str
    pages: list[int]


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Server: ``len(checksums)`` pages follow, each with its checksum; none when all have been sent. Not ``ok``: ``why``, and nothing follows."""

    ok: bool
    checksums: list[int] = []
    why: str = ""


def framed(message: Ask | Reply) -> bytes:
    """The frame of a message, to be sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


class Broken(PeerError):
    """The connection ended: closed, reset, or never made."""


class Wire:
    """One connected socket. It belongs to one thread; ``shutdown`` may come from another."""

    def __init__(self, sock: socket.socket) -> None:
        # The system waits, not this thread: it is asked once for many bytes, and comes back at the latest after a slice.
        sock.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _SLICE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def close(self) -> None:
        self._sock.close()

    def shutdown(self) -> None:
        """Wake whoever waits on it; the connection is over."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was over already

    # -- bytes ----------------------------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[memoryview | bytes], check: Check) -> None:
        """Send all parts, gathered by the system. Raises PeerError when the peer is gone or ``check`` says so."""
        left = [memoryview(p) for p in parts]
        while left:
            check()
            try:
                n = self._sock.sendmsg(left[:_IOV_MAX])
            except BlockingIOError:
                continue
            except OSError as e:
                raise Broken(f"the connection to the peer broke ({type(e).__name__})") from e
            left = _after(left, n)

    def receive(self, parts: Sequence[memoryview], check: Check) -> None:
        """Fill all parts, scattered by the system. Raises PeerError when the peer is gone or ``check`` says so."""
        left = list(parts)
        while left:
            check()
            try:
                n = self._sock.recvmsg_into(left[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as e:
                raise Broken(f"the connection to the peer broke ({type(e).__name__})") from e
            if n == 0:
                raise Broken("the peer has closed the connection")
            left = _after(left, n)

    def wait_readable(self) -> None:
        """Block until there is something to read, or the connection is over."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll()

    # -- frames ---------------------------------------------------------------------------------------------------------------------

    def receive_ask(self, check: Check) -> Ask:
        return _decode(self._receive_frame(check), Ask)

    def receive_reply(self, check: Check) -> Reply:
        return _decode(self._receive_frame(check), Reply)

    def _receive_frame(self, check: Check) -> bytearray:
        head = self._take(4, check)
        n = int.from_bytes(head, "little")
        if n > MAX_FRAME_BYTES:
            raise PeerError(f"a frame of {n:,} bytes, limit {MAX_FRAME_BYTES:,}")
        return self._take(n, check)

    def _take(self, n: int, check: Check) -> bytearray:
        out = bytearray(n)
        self.receive([memoryview(out)] if n else [], check)
        return out

    # -- the handshake --------------------------------------------------------------------------------------------------------------

    def greet(self, secret: bytes, life: bytes, layout: bytes, check: Check) -> None:
        """The server's part. Raises PeerError when the client does not know the secret, or asks for another life or layout."""
        mine = secrets.token_bytes(NONCE_BYTES)
        self.send([MAGIC + mine], check)
        theirs = self._nonce(check)
        proof = bytes(self._take(PROOF_BYTES, check))
        both = mine + theirs + life + layout
        if not hmac.compare_digest(proof, _proof(secret, b"client", both)):
            raise PeerError("a client of the pages failed its handshake")
        self.send([_proof(secret, b"server", both)], check)

    def meet(self, secret: bytes, life: bytes, layout: bytes, check: Check) -> None:
        """The client's part. Raises PeerError when the server does not know the secret, or has another life or layout."""
        theirs = self._nonce(check)
        mine = secrets.token_bytes(NONCE_BYTES)
        both = theirs + mine + life + layout
        try:
            self.send([MAGIC + mine + _proof(secret, b"client", both)], check)
            proof = bytes(self._take(PROOF_BYTES, check))
        except PeerError as e:
            raise PeerError(
                f"the handshake failed (another secret, page layout or life of the peer?): {e.message}"
            ) from e
        if not hmac.compare_digest(proof, _proof(secret, b"server", both)):
            raise PeerError("the peer does not know this deployment's secret")

    def _nonce(self, check: Check) -> bytes:
        greeting = self._take(len(MAGIC) + NONCE_BYTES, check)
        if greeting[: len(MAGIC)] != MAGIC:
            raise PeerError("the peer does not speak this protocol")
        return bytes(greeting[len(MAGIC) :])


def _proof(secret: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.digest(secret, role + both, "sha256")


def _decode(frame: bytearray, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise PeerError(f"a frame could not be read: {e}") from e


def _after(parts: list[memoryview], n: int) -> list[memoryview]:
    """What is left of ``parts`` after their first ``n`` bytes."""
    at = 0
    while at < len(parts) and n >= len(parts[at]):
        n -= len(parts[at])
        at += 1
    rest = parts[at:]
    if n:
        rest[0] = rest[0][n:]
    return rest
