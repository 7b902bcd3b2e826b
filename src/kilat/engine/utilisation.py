"""How busy a device is: what ran on it laid over what the host did meanwhile. Pure; times are nanoseconds of one clock."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

BETWEEN = "device: between kernels"
"""Work was launched and the device had not begun it: the way of a launch, and the ends and starts of kernels."""
COPYING = "device: only copies"
UNKNOWN = "host: not recorded"
MOST_KERNELS = 12


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel, or a ``copy``, on the device. ``queued_ns``: when the host's call that launched it was over; None: not known."""

    begin_ns: int
    end_ns: int
    name: str
    queued_ns: int | None = None
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """What the host's thread did."""

    begin_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Of a window of ``wall_ns``: a kernel ran for ``busy_ns``, and ``gaps_ns`` names all the rest, longest first. ``kernels``: (name, ns,
    how many began), longest first; those that ran at the same time count each."""

    wall_ns: int
    busy_ns: int
    gaps_ns: dict[str, int]
    kernels: list[tuple[str, int, int]]


def device_use(spans: Iterable[Span], phases: Iterable[Phase], begin_ns: int, end_ns: int) -> DeviceUse:
    """Look at ``begin_ns`` to ``end_ns``; spans and phases may reach beyond. ``phases`` do not overlap.

    A moment without a kernel belongs to a copy if one runs. Else it belongs to what comes next on the device: as long as that had not been
    launched, to the host's phase of that moment; after it, to the device.
    """
    ordered = sorted(spans, key=lambda s: s.begin_ns)
    begins = [s.begin_ns for s in ordered]
    busy = _union((s.begin_ns, s.end_ns) for s in ordered if not s.copy)
    copies = _union((s.begin_ns, s.end_ns) for s in ordered if s.copy)
    named = _Phases(phases)
    gaps: Counter[str] = Counter()
    idle = 0
    for begin, end in _outside(busy, begin_ns, end_ns):
        idle += end - begin
        for a, b in _outside(copies, begin, end):
            at = bisect_left(begins, b)
            queued = ordered[at].queued_ns if at < len(ordered) else None
            launched = b if queued is None else min(max(queued, a), b)
            named.add(a, launched, gaps)
            gaps[BETWEEN] += b - launched
    gaps[COPYING] += idle - gaps.total()
    return DeviceUse(
        end_ns - begin_ns,
        end_ns - begin_ns - idle,
        {name: ns for name, ns in gaps.most_common() if ns},
        _kernels(ordered, begin_ns, end_ns),
    )


class _Phases:
    """The host's phases by time."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._phases = sorted(phases, key=lambda p: p.begin_ns)
        self._ends = [p.end_ns for p in self._phases]

    def add(self, a: int, b: int, to: Counter[str]) -> None:
        """Add the time from ``a`` to ``b`` to the names of the phases that it lies in."""
        left = b - a
        for p in self._phases[bisect_right(self._ends, a) :]:
            if p.begin_ns >= b:
                break
            ns = min(p.end_ns, b) - max(p.begin_ns, a)
            to[p.name] += ns
            left -= ns
        to[UNKNOWN] += left


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """``intervals``, in the order of their begins, as intervals that do not touch."""
    out: list[tuple[int, int]] = []
    for a, b in intervals:
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        elif b > a:
            out.append((a, b))
    return out


def _outside(taken: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of ``begin`` to ``end`` that lie in none of ``taken``, a result of :func:`_union`."""
    for a, b in taken[bisect_right(taken, begin, key=lambda t: t[1]) :]:
        if a >= end:
            break
        if a > begin:
            yield begin, a
        begin = b
    if begin < end:
        yield begin, end


def _kernels(ordered: Iterable[Span], begin_ns: int, end_ns: int) -> list[tuple[str, int, int]]:
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for s in ordered:
        ns = min(s.end_ns, end_ns) - max(s.begin_ns, begin_ns)
        if not s.copy and ns > 0:
            times[s.name] += ns
            counts[s.name] += begin_ns <= s.begin_ns
    return [(name, ns, counts[name]) for name, ns in times.most_common()]


@dataclass(frozen=True, slots=True)
class Roofs:
    """What the device reaches: a large copy, bytes read plus bytes written a second, and ``product``, such as "bfloat16 8192^3"."""

    copy_bytes_per_s: float
    product_flops_per_s: float
    product: str


@dataclass(frozen=True, slots=True)
class Steps:
    """A window of ``n`` steps that took ``wall_ns``; the other numbers are sums over the steps, bytes and operations the least possible."""

    n: int
    wall_ns: int
    rows: int
    tokens: int
    read_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the time: milliseconds of a mean step, ``share`` of the window, and how often it happened in a mean step."""

    name: str
    ms: float
    share: float
    n: float | None = None


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Means over the steps of a window. ``step_ms`` is without a profiler; the roofs' shares go with it. ``watched_step_ms`` is the time of
    the steps that ``busy_share``, ``gaps`` and ``kernels`` are of; they say nothing (None, empty) when ``note`` says why.

    ``bandwidth_share``: the bytes that must be read over what a copy moves in the same time; ``arithmetic_share``: the operations over those
    of a large matrix product. ``gaps`` cover all time in which no kernel ran (``busy``: what was looked for).
    """

    device: str
    steps: int
    rows: float
    tokens: float
    step_ms: float
    watched_step_ms: float
    read_bytes: float
    flops: float
    roofs: Roofs
    bandwidth_share: float
    arithmetic_share: float
    busy: str
    busy_share: float | None
    gaps: list[Share]
    kernels: list[Share]
    note: str | None = None


def utilisation(
    device: str, busy: str, steps: Steps, watched: tuple[int, DeviceUse] | str, roofs: Roofs
) -> Utilisation:
    """Sum up. ``watched``: how many steps a device was looked at and what was seen, or why nothing was seen. ``steps.n`` is 1 or more."""
    step_s = steps.wall_ns / steps.n * 1e-9
    read_bytes, flops = steps.read_bytes / steps.n, steps.flops / steps.n
    n, use = (steps.n, None) if isinstance(watched, str) else watched
    gaps: list[Share] = []
    kernels: list[Share] = []
    if use is not None:
        gaps = [Share(name, ns / n * 1e-6, ns / use.wall_ns) for name, ns in use.gaps_ns.items()]
        kernels = [Share(k, ns / n * 1e-6, ns / use.wall_ns, times / n) for k, ns, times in use.kernels]
    return Utilisation(
        device=device,
        steps=steps.n,
        rows=steps.rows / steps.n,
        tokens=steps.tokens / steps.n,
        step_ms=step_s * 1e3,
        watched_step_ms=(use.wall_ns / n * 1e-6) if use else step_s * 1e3,
        read_bytes=read_bytes,
        flops=flops,
        roofs=roofs,
        bandwidth_share=read_bytes / step_s / roofs.copy_bytes_per_s,
        arithmetic_share=flops / step_s / roofs.product_flops_per_s,
        busy=busy,
        busy_share=use.busy_ns / use.wall_ns if use else None,
        gaps=gaps,
        kernels=kernels[:MOST_KERNELS],
        note=watched if isinstance(watched, str) else None,
    )
