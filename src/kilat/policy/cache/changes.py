"""PageChanges: what became findable, and what no longer is, since somebody last asked."""


class PageChanges:
    """Net changes of a pool's index. A name that came and went (or went and came) between two calls of :meth:`take` is not told."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._dropped: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._dropped)

    def store(self, name: bytes) -> None:
        """``name`` can be found from now on."""
        if name in self._dropped:
            del self._dropped[name]
        else:
            self._stored[name] = None

    def drop(self, name: bytes) -> None:
        """``name`` can no longer be found."""
        if name in self._stored:
            del self._stored[name]
        else:
            self._dropped[name] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, dropped) since the last call, each in the order it happened."""
        news = list(self._stored), list(self._dropped)
        self._stored, self._dropped = {}, {}
        return news
