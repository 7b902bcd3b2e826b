"""Products of many rows: torch's call, or the library's algorithm that measured faster.

For some products the library's own guess is 2 to 15 % slower than what it can do, and torch's FP8 call never cuts K, which costs up to 40 %.
While an engine has nothing to do, :meth:`Products.measure_next` tries algorithms on the weights that are loaded, one kind of product and number of
rows a call (some tenths of a second). What was found is kept in the cache folder for the device and the library's version, so a machine
measures a model once. What was not measured, or is as fast as it comes, stays with torch.
"""

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kilat.base import env
from kilat.base.log import event, get_logger
from kilat.ops.cuda import blas_lt
from kilat.ops.cuda.blas_lt import Algorithm, Kind, Operands, Product, kind_of
from kilat.ops.cuda.compile import keep
from kilat.ops.fp8_linear import FP8

DTYPES = (torch.bfloat16, FP8)
SIZES = (128, 256, 512, 1024)
"""Numbers of rows that are measured; each stands for those from three quarters of it on."""
GAIN = 0.98
"""An algorithm is taken that needs at most this much of the time of torch's call."""
SUGGESTIONS, BEST, FINALISTS, ROUNDS = 8, 3, 3, 5
CLUSTERS = (2, 3, 4, 5, 6)
"""Shapes of clusters by the library's numbers: 1 x 1, 2 x 1, 4 x 1, 1 x 2, 2 x 2 blocks."""
SPLITS = (1, 2, 3, 4, 6, 8)
REDUCTIONS = (0, 2)
"""How the parts of K are added: as they are, or in fp32."""
MOST_WEIGHTS = 16
COLD_BYTES = 200 << 20
"""Weights that are read in turn while measuring, so that none is still in L2 when it is read again."""
GROUP_US = 400.0
LEAD_CYCLES = 500_000
"""How long the device idles before a group of launches, so that all are queued when it begins."""

A = TypeVar("A")
Picks = dict[tuple[Kind, int], Algorithm | None]

_log = get_logger("ops.cuda")


class Products:
    """What was measured on this machine before and by :meth:`measure_next`, and the weights that it measures with. For one thread and stream."""

    def __init__(self) -> None:
        self.picks: Picks = {}
        self._weights: dict[Kind, list[weakref.ref[Tensor]]] = {}
        self._usable = (
            torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and blas_lt.present()
        )
        if self._usable:
            self._path = _path()
            with suppress(OSError, ValueError, TypeError):
                self.picks = read_picks(self._path.read_text(encoding="ascii"))

    def register(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """A weight [n, k], bf16 or e4m3, whose products may be measured; it is not kept alive."""
        aligned = 128 if weight.dtype == FP8 else 8
        if not weight.is_cuda or weight.dtype not in DTYPES or any(n % aligned for n in weight.shape):
            return
        refs = self._weights.setdefault(kind_of(weight, bias), [])
        refs[:] = [r for r in refs if r() is not None][1 - MOST_WEIGHTS :]
        refs.append(weakref.ref(weight))

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        x_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
    ) -> Tensor:
        """x [T, K] times weight [N, K]^T plus bias [N]: of one dtype, or bf16 of e4m3 with the scales of ops/triton/fp8_linear.py and without
        bias. Not batch-invariant."""
        if x.is_cuda and x.dtype == weight.dtype and weight.dtype in DTYPES:
            kind = kind_of(weight, bias)
            algorithm = self.picks.get((kind, size_of(x.shape[0])))
            if algorithm is not None:
                y = x.new_empty(x.shape[0], kind.n, dtype=torch.bfloat16)
                operands = Operands(x, weight, y, bias, x_scale, weight_scale)
                if operands.can_be_taken() and _product(kind, x.shape[0]).run(algorithm, operands):
                    return y
        return _torch_call(x, weight, bias, x_scale, weight_scale)

    def measure_next(self, most_rows: int) -> bool:
        """Measure one more kind of product that steps of up to ``most_rows`` rows need; False when nothing is left. Nothing else may run on
        the device."""
        for kind, refs in self._weights.items() if self._usable else ():
            weights = [w for w in (r() for r in refs) if w is not None]
            for size in SIZES:
                if weights and (kind, size) not in self.picks and 3 * size <= 4 * most_rows:
                    self.picks[kind, size] = _measure(kind, size, weights)
                    self._keep()
                    return True
        return False

    def _keep(self) -> None:
        try:
            keep(self._path, written_picks(self.picks).encode())
        except OSError as e:  # they are measured again next time
            event(_log, "measured products could not be kept", folder=self._path.parent, why=e.strerror)


@cache
def products() -> Products:
    """Those of this process."""
    return Products()


def size_of(n_rows: int) -> int:
    """The measured size that stands for ``n_rows``; 0 when none does."""
    return next((s for s in SIZES if n_rows <= s and 4 * n_rows >= 3 * s), 0)


def search(
    suggested: Iterable[A],
    neighbours: Sequence[Callable[[A], Iterable[A]]],
    us: Callable[[A], float],
    key: Callable[[A], bytes],
) -> list[A]:
    """The fastest few of ``suggested`` and of what lies around them: each of ``neighbours`` starts from the best so far."""
    took: dict[bytes, tuple[float, A]] = {}

    def best(n: int) -> list[A]:
        ranked = sorted(took.values(), key=lambda t: t[0])
        return [a for time_us, a in ranked[:n] if time_us < float("inf")]

    def look(algorithms: Iterable[A]) -> None:
        for a in algorithms:
            if key(a) not in took:
                took[key(a)] = us(a), a

    look(suggested)
    for around in neighbours:
        for a in best(BEST):
            look(around(a))
    return best(FINALISTS)


def _measure(kind: Kind, size: int, weights: list[Tensor]) -> Algorithm | None:
    """The algorithm to take, None where torch's call is as fast, the library has nothing or the device no room to measure."""
    try:
        calls = _calls(kind, size, weights)
        one = _product(kind, size)

        def us(a: Algorithm) -> float:
            can = one.takes(a) and one.run(a, calls[0])
            return _time_us(lambda o: one.run(a, o), calls) if can else float("inf")

        found = search(one.suggested(SUGGESTIONS), 2 * (_clusters, _tiles, _choices, _splits), us, bytes)
        found = [a for a in found if _is_right(one, a, calls[0])]
        runs: list[Callable[[Operands], object]] = [_torch_product]
        runs += [lambda o, a=a: one.run(a, o) for a in found]  # type: ignore[misc]
        # in turn, for the device's clock falls while it works
        rounds = [[_time_us(run, calls) for run in runs] for _ in range(ROUNDS)]
    except (
        RuntimeError
    ) as e:  # out of memory is one too; while nothing runs, an engine must not end by a measurement
        _log.debug("%s rows of %s were not measured: %s", size, kind, e)
        return None
    usual, *others = (median(times) for times in zip(*rounds))
    took_us, taken = min(zip(others, found), key=lambda t: t[0], default=(usual, None))
    _log.debug("%s rows of %s: %.1f us instead of %.1f", size, kind, took_us, usual)
    return taken if took_us <= GAIN * usual else None


def _calls(kind: Kind, size: int, weights: list[Tensor]) -> list[Operands]:
    """Calls with one random x and different weights."""
    device = weights[0].device
    x = torch.randn(size, kind.k, device=device).to(weights[0].dtype)
    y = torch.empty(size, kind.n, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(kind.n, dtype=torch.bfloat16, device=device) if kind.bias else None
    x_scale = weight_scale = None
    if kind.fp8:
        groups = kind.k // 128
        x_scale = torch.ones(groups, size, device=device)
        weight_scale = torch.full((kind.n // 128, (groups + 3) // 4 * 4), 1e-3, device=device)
    enough = 1 + COLD_BYTES // (weights[0].numel() * weights[0].element_size())
    return [Operands(x, w, y, bias, x_scale, weight_scale) for w in weights[:enough]]


def _is_right(one: Product, a: Algorithm, o: Operands) -> bool:
    want = _torch_product(o)
    o.y.zero_()
    one.run(a, o)
    return (o.y - want).abs().max().item() <= 0.02 * want.abs().max().item()


def _time_us(run: Callable[[Operands], object], calls: list[Operands]) -> float:
    """Microseconds of a call, in a group of some that the device does one after the other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    guess_us = 2e-9 * calls[0].x.numel() * calls[0].weight.shape[0]
    n = max(2, min(8, int(GROUP_US / guess_us)))
    torch.cuda._sleep(LEAD_CYCLES)
    begin.record()
    for i in range(n):
        run(calls[i % len(calls)])
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / n


def _tiles(a: Algorithm) -> Iterable[Algorithm]:
    return _there(a.with_fields(tile=t) for t in a.tiles())


def _clusters(a: Algorithm) -> Iterable[Algorithm]:
    return _there(a.with_fields(cluster=c) for c in CLUSTERS)


def _choices(a: Algorithm) -> Iterable[Algorithm]:
    return _there(a.with_fields(custom=c, swizzle=s) for c in a.customs() for s in (0, 1))


def _splits(a: Algorithm) -> Iterable[Algorithm]:
    return _there(a.with_fields(splits=n, reduction=r) for n in SPLITS for r in REDUCTIONS)


def _there(variants: Iterable[Algorithm | None]) -> Iterable[Algorithm]:
    return (v for v in variants if v is not None)


def _torch_product(o: Operands) -> Tensor:
    return _torch_call(o.x, o.weight, o.bias, o.x_scale, o.weight_scale)


def _torch_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    if x_scale is None or weight_scale is None:
        return F.linear(x, weight, bias)
    kinds = F.ScalingType
    return F.scaled_mm(
        x, weight.t(), x_scale.t(), kinds.BlockWise1x128, weight_scale.t(), kinds.BlockWise128x128, output_dtype=torch.bfloat16
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _product(kind: Kind, n_rows: int) -> Product:
    return Product(kind, n_rows)


def read_picks(text: str) -> Picks:
    """Of :func:`written_picks`. Raises ValueError or TypeError for anything else."""
    return {
        (Kind(bool(fp8), n, k, bool(bias)), size): Algorithm.from_buffer_copy(bytes.fromhex(of))
        if of
        else None
        for fp8, n, k, bias, size, of in json.loads(text)
    }


def written_picks(picks: Picks) -> str:
    """Rows of FP8, N, K, bias, number of rows, algorithm in hex or nothing."""
    return json.dumps(
        [
            [int(kind.fp8), kind.n, kind.k, int(kind.bias), size, bytes(of).hex() if of else ""]
            for (kind, size), of in picks.items()
        ]
    )


def _path() -> Path:
    device = torch.cuda.get_device_name().replace(" ", "-")
    return env.cache_dir() / "cuda" / f"products-{device}-{blas_lt.version()}.json"
