"""What a supervisor needs of whatever starts its worker."""

from typing import Protocol

from kilat.cluster.config import Place
from kilat.cluster.worker_config import WorkerConfig


class Handle(Protocol):
    """One process that runs, or has ended. ``host`` names its machine, and is empty for this one."""

    @property
    def pid(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def ended(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        ...

    @property
    def blind(self) -> bool:
        """Whether the launcher cannot see the process at present: it may run or not, and only its own words tell."""
        ...

    async def wait(self) -> int | None:
        """Its exit code, negative for a signal, once it has ended; None when that will never be known. One caller at a time."""
        ...

    def terminate(self) -> None:
        """Ask it to end; may get lost."""
        ...

    def kill(self) -> None:
        """End it whatever it does. :meth:`wait` returns soon afterwards, also for a process that cannot be reached."""
        ...


class Launcher(Protocol):
    """Starts workers. Belongs to the event loop's thread, and never blocks it."""

    async def start(self, place: Place, config: WorkerConfig) -> Handle:
        """Start the worker of a place. Raises PeerError when that failed and may work later, EngineError when it never will. A caller
        that is cancelled leaves no process behind."""
        ...

    async def close(self) -> None:
        """After the last process has ended."""
        ...
