"""`kilat cache explain ID`: why the start of a prompt was, or was not, taken from pages that existed."""

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from kilat.cli.client import Client


def run(args: argparse.Namespace) -> int:
    """Ask the server and tell it in sentences."""
    told = asyncio.run(_explain(args))
    for line in explanation(told):
        print(line)
    return 0


async def _explain(args: argparse.Namespace) -> dict[str, Any]:
    async with Client(args.url, api_key=args.api_key) as client:
        return await client.get(f"/v1/cache/explain/{quote(args.id, safe='')}")


def explanation(told: dict[str, Any]) -> Iterator[str]:
    """The lines for what ``GET /v1/cache/explain/ID`` answers."""
    yield told["id"]
    for i, prompt in enumerate(told["prompts"]):
        if not prompt["routes"]:
            yield f"  prompt {i}: not known any more"
            continue
        cached = prompt["cached_tokens"]
        found = "not computed yet" if cached is None else f"{cached} found in the prefix cache"
        yield f"  prompt {i}: {prompt['prompt_tokens']} tokens, {found}"
        for back in prompt.get("recalled", []):
            pages = " and ".join(f"{n} pages from its {tier} cache" for tier, n in back["pages"].items())
            yield f"    {back['worker']} took {pages}"
        for k, route in enumerate(prompt["routes"]):
            yield from _route(route, again=k > 0)


def _route(route: dict[str, Any], *, again: bool) -> Iterator[str]:
    why = route["why"]
    then = f", handed over to {route['decode']}" if route["decode"] else ""
    yield f"    {'again ' if again else ''}to {route['worker']}{then}: {why.get('reason', 'chosen')}"
    if route["lend_from"]:
        yield f"      {route['lent_pages']} pages from {route['lend_from']}"
    for worker, n_pages in why.get("pages_held", {}).items():
        yield f"      {worker} held {n_pages} pages of it"
    miss = why.get("miss")
    if miss:
        yield f"      page {miss['first_missing_page']} was missing: {miss['because']}"
    for worker, reason in why.get("refused", {}).items():
        yield f"      not {worker}: {reason}"
