"""`kilat bench throughput --utilisation`: how busy the device is in the middle of a round, and what it waits for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kilat.base import metrics
from kilat.cli.report import print_table

if TYPE_CHECKING:
    from kilat.engine.core import Engine
    from kilat.engine.utilisation import Utilisation

MOST_STEPS = 20
NAME_WIDTH = 72


def watch_round(
    engine: "Engine", output_tokens: int, threads: int, run: Callable[[], object]
) -> "Utilisation | None":
    """Measure the roofs, then ``run`` a round of ``output_tokens`` and watch steps in its middle; None when it has too few of them."""
    import torch

    from kilat.engine.roofs import measure_roofs
    from kilat.engine.watch import watch_steps

    roofs = measure_roofs(engine.pages.kv.device, getattr(torch, engine.info.dtype), threads)
    n_steps, n_tokens = engine.step_count, engine.counters()[metrics.OUTPUT_TOKENS]

    def middle() -> int:
        if engine.counters()[metrics.OUTPUT_TOKENS] - n_tokens < output_tokens / 2:
            return 0
        return window_steps(engine.step_count - n_steps)

    watch = watch_steps(engine, middle)
    run()
    return watch.finish(roofs)


def window_steps(n_done: int) -> int:
    """Steps of a window in the middle of a round that has done ``n_done``: two of them have to fit in the rest."""
    return max(1, min(MOST_STEPS, n_done // 3))


def show(use: "Utilisation | None") -> None:
    """Print it."""
    if use is None:
        print("utilisation: the round had too few steps to look at; ask for more requests or longer answers")
        return
    print_table(
        f"utilisation of {use.device}, {use.steps} steps in the middle of a round: "
        f"{use.rows:.1f} rows, {use.tokens:.1f} tokens a step",
        ("", "a step", "share", "of"),
        _summary(use),
    )
    if use.note:
        print(use.note)
    if use.gaps:
        lines = [[s.name, f"{s.ms:.3f}", f"{s.share:.2%}"] for s in use.gaps]
        print_table(f"time without {use.busy}", ("", "ms a step", "share"), lines)
    if len(use.kernels) > 1:
        lines = [
            [s.name[:NAME_WIDTH], f"{s.ms:.3f}", f"{s.share:.2%}", f"{s.n or 0:.1f}"] for s in use.kernels
        ]
        print_table(use.busy, ("", "ms a step", "share", "times a step"), lines)


def _summary(use: "Utilisation") -> list[list[str]]:
    roofs = use.roofs
    busy = "-" if use.busy_share is None else f"{use.busy_share:.1%}"
    under = "" if use.busy != "kernels" or use.note else " under the profiler"
    return [
        ["step", f"{use.step_ms:.2f} ms", "", ""],
        [f"busy: {use.busy}", f"{use.watched_step_ms:.2f} ms{under}", busy, "time"],
        [
            "bandwidth",
            f"{use.read_bytes / 1e9:.3f} GB",
            f"{use.bandwidth_share:.1%}",
            f"{roofs.copy_bytes_per_s / 1e9:,.1f} GB/s: a copy",
        ],
        [
            "arithmetic",
            f"{use.flops / 1e12:.4f} TFLOP",
            f"{use.arithmetic_share:.1%}",
            f"{roofs.product_flops_per_s / 1e12:,.2f} TFLOP/s: {roofs.product}",
        ],
    ]
