"""msgpack frames. Decoding checks types and sizes; a bad frame raises :class:`PeerError` and touches nothing."""

from typing import TypeVar

import msgspec

from kilat.base.errors import PeerError
from kilat.wire.messages import FromWorker, ToWorker

MAX_FRAME_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """One message as one frame."""
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """A frame from a gateway. Raises PeerError when it is too long or not one of the messages."""
    return _decode(_to_worker, frame)


def decode_from_worker(frame: bytes) -> FromWorker:
    """A frame from a worker. Raises PeerError when it is too long or not one of the messages."""
    return _decode(_from_worker, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", frame: bytes) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise PeerError(f"a frame has {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise PeerError(f"a frame could not be read: {e}") from e
