"""Server-sent events: bytes in any pieces -> data payloads."""

from kilat.base.errors import PeerError

MAX_EVENT_BYTES = 16 * 1024 * 1024


class SseSplitter:
    """Collects the bytes of one response body; owns what is not a whole event yet."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The payloads of the ``data:`` lines that ``data`` completes, in order. Other lines are comments and
        fields we do not use.

        Raises PeerError when one line is over 16 MiB.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise PeerError(f"the server sent an event of over {MAX_EVENT_BYTES:,} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
