"""Finds stop strings in a text that arrives in pieces (Aho and Corasick 1975), in time linear in the text."""

from collections.abc import Sequence


class StopMatcher:
    """Feed it every character once, in order.

    ``pending`` is how many of the last characters may be the start of a stop string: those must not be sent yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]
        for stop in filter(None, stops):
            node = 0
            for char in stop:
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._stop.append(None)
                node = self._next[node][char]
            self._stop[node] = stop
        self._fall = [0] * len(self._next)
        self._link()
        self._node = 0

    def _link(self) -> None:
        """Where to go on when a character does not fit: the longest proper suffix that starts a stop string too."""
        level = list(self._next[0].values())
        while level:
            below = []
            for node in level:
                for char, child in self._next[node].items():
                    self._fall[child] = self._step(self._fall[node], char)
                    # the longest stop string that ends here wins, so the one of a suffix counts only if there is no own
                    self._stop[child] = self._stop[child] or self._stop[self._fall[child]]
                    below.append(child)
            level = below

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fall[node]
        return self._next[node].get(char, 0)

    @property
    def pending(self) -> int:
        """Length of the longest end of the text so far that may grow into a stop string."""
        return self._depth[self._node]

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """(number of characters of ``text`` up to the end of a stop string, that stop string) for the first one to be complete, the
        longest if several end together; None if there is none. Not ``armed``: one that is complete is let pass."""
        node, following = self._node, self._next
        for at, char in enumerate(text):
            child = following[node].get(char)
            if child is None:
                child = self._step(node, char) if node else 0
            node = child
            if armed and (stop := self._stop[node]) is not None:
                self._node = node
                return at + 1, stop
        self._node = node
        return None
