"""What the gateway and its Ray driver say to each other: lines of JSON over the driver's standard input and output."""

import msgspec


class Setup(msgspec.Struct, frozen=True, tag="setup", forbid_unknown_fields=True):
    """The first line. ``places``: workers there are at least, each with so much of a host; ``one_host``: they cannot be reached from others."""

    address: str
    places: int
    cpus: float
    gpus: float
    one_host: bool


class Start(msgspec.Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """Start the worker ``key`` in a place, a number; those from ``places`` on are added while they are needed. ``command``: arguments for Python; ``config``: a WorkerConfig."""

    key: str
    place: int
    command: list[str]
    config: msgspec.Raw


class Find(msgspec.Struct, frozen=True, tag="find", forbid_unknown_fields=True):
    """Take over a worker that an actor which is gone has started."""

    key: str
    place: int
    folder: str
    pid: int


class Signal(msgspec.Struct, frozen=True, tag="signal", forbid_unknown_fields=True):
    """Send a signal to a worker; one that is being started does not start."""

    key: str
    number: int


class Up(msgspec.Struct, frozen=True, tag="up", forbid_unknown_fields=True):
    """The driver is connected to Ray."""


class Down(msgspec.Struct, frozen=True, tag="down", forbid_unknown_fields=True):
    """The driver could not connect, and ends."""

    why: str


class Started(msgspec.Struct, frozen=True, tag="started", forbid_unknown_fields=True):
    """A worker runs, and can be seen. ``folder`` is for :class:`Find`."""

    key: str
    pid: int
    folder: str
    host: str


class Exited(msgspec.Struct, frozen=True, tag="exited", forbid_unknown_fields=True):
    """A worker has ended."""

    key: str
    code: int


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """A worker was not started or found. ``final``: trying again would fail again."""

    key: str
    why: str
    final: bool = False


class Lost(msgspec.Struct, frozen=True, tag="lost", forbid_unknown_fields=True):
    """The actor of a worker is gone. The worker may run on."""

    key: str
    why: str


ToDriver = Setup | Start | Find | Signal
FromDriver = Up | Down | Started | Exited | Failed | Lost

to_driver = msgspec.json.Decoder(ToDriver)
from_driver = msgspec.json.Decoder(FromDriver)


def line(message: ToDriver | FromDriver) -> bytes:
    """One message as one line."""
    return msgspec.json.encode(message) + b"\n"
