"""What goes wrong in a run, and when. An edge is every moment in which a worker begins to handle something or sends something."""

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fault:
    """At its ``edge``-th edge a worker ends (``freeze_s`` None) or stands still for a while."""

    edge: int
    freeze_s: float | None = None


@dataclass(frozen=True, slots=True)
class Weather:
    """How messages travel. Those of one link keep their order, because a link is one connection; those of different links do not.

    ``delay_s``: least and greatest time on the wire. ``lose``: share of lost messages among those that are only best effort (page names,
    status, news of moves). ``cut``: share of the others at which the connection breaks instead, as it does in life: the worker is taken
    for dead while it goes on for a while. ``stray``: share of the best-effort ones that come late and out of order.
    """

    delay_s: tuple[float, float] = (0.0001, 0.002)
    lose: float = 0.0
    cut: float = 0.0
    stray: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """``by_worker``: fault of one life of a worker, by its id: ``p0.0`` is the first life of ``p0``, ``p0.1`` the next."""

    weather: Weather = field(default_factory=Weather)
    by_worker: dict[str, Fault] = field(default_factory=dict)


def draw_faults(rng: random.Random, names: list[str]) -> Faults:
    """Faults of a random run: calm, only bad weather, crashes, freezes, or all together."""
    slow = rng.choice((0.001, 0.01, 0.1))
    weather = Weather(
        (0.0001, slow),
        lose=rng.choice((0.0, 0.0, 0.1, 0.4)),
        cut=rng.choice((0.0, 0.0, 0.01)),
        stray=rng.choice((0.0, 0.0, 0.2)),
    )
    by_worker: dict[str, Fault] = {}
    for worker_id in [f"{name}.{life}" for name in names for life in (0, 1)]:
        kind = rng.random()
        edge = int(rng.expovariate(1 / 60))
        if kind < 0.25:
            by_worker[worker_id] = Fault(edge)
        elif kind < 0.45:
            by_worker[worker_id] = Fault(edge, rng.choice((0.05, 0.5, 3.0)))
    return Faults(weather, by_worker)
