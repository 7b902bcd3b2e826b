"""`kilat top`: a live table of a server's workers. Without a terminal: one table."""

import argparse
import asyncio
import time
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kilat.base.errors import PeerError
from kilat.cli.client import Client
from kilat.cli.report import PLAIN_WIDTH
from kilat.cli.text import count_text, n_bytes_text

COLUMNS = (
    "worker",
    "state",
    "roles",
    "running",
    "waiting",
    "pages",
    "cached",
    "hits",
    "prompt/s",
    "tokens/s",
    "step ms",
)


def run(args: argparse.Namespace) -> int:
    """Look until Ctrl-C, or once."""
    console = Console()
    if args.once or not console.is_terminal:
        console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
        console.print(asyncio.run(_once(args)))
        return 0
    asyncio.run(_watch(args, console))
    return 0


async def _once(args: argparse.Namespace) -> Group:
    async with Client(args.url, api_key=args.api_key) as client:
        return screen(None, await client.get("/cluster/workers"), 0.0)


async def _watch(args: argparse.Namespace, console: Console) -> None:
    before: dict[str, Any] | None = None
    at_s = 0.0
    async with Client(args.url, api_key=args.api_key) as client:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                now_s = time.monotonic()
                try:
                    seen = await client.get("/cluster/workers")
                    live.update(screen(before, seen, now_s - at_s), refresh=True)
                    before, at_s = seen, now_s
                except PeerError as e:
                    live.update(Text(e.message), refresh=True)
                    before = None
                await asyncio.sleep(args.interval)


def screen(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> Group:
    """What is shown for two answers of ``GET /cluster/workers`` that lie ``seconds`` apart; rates need both, of the same process."""
    last = {w["id"]: w for w in before["workers"]} if before is not None else {}
    table = Table(box=box.SIMPLE)
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 3 else "right")
    for w in now["workers"]:
        table.add_row(*row(last.get(w["id"]), w, seconds))
    t = now["totals"]
    head = f"{now['model']}: {t['open_requests']} requests open"
    foot = (
        f"hand-overs {t['hand_overs']}  planned moves {t['planned_moves']}  prefixes lent {t['prefix_lends']}  "
        f"moves open {t['moves_open']} done {t['moves_done']} failed {t['moves_failed']} ({n_bytes_text(t['moved_bytes'])})  "
        f"retries {t['session_retries']}"
    )
    return Group(Text(head), table, Text(foot))


def row(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> list[str]:
    """The cells of one worker."""
    c, g = now["counters"], now["gauges"]

    def rate(name: str) -> str:
        if before is None or seconds <= 0:
            return "-"
        return count_text((c[name] - before["counters"][name]) / seconds)

    queried = c["prefix_queried_tokens"]
    pages = f"{g['pages_used']:.0f}/{now['n_pages']}" if now["n_pages"] is not None else "-"
    return [
        now["name"],
        now["state"],
        f"P {now['prefill_weight']:g} D {now['decode_weight']:g}",
        f"{g['sessions_running']:.0f}",
        f"{g['sessions_waiting']:.0f}",
        pages,
        f"{g['pages_cached']:.0f}",
        f"{100 * c['prefix_hit_tokens'] / queried:.0f} %" if queried else "-",
        rate("prompt_tokens"),
        rate("output_tokens"),
        f"{now['step_ms']:.1f}" if now["step_ms"] else "-",
    ]
