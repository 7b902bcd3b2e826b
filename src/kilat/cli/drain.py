"""`kilat drain WORKER`: take one worker out of a server that goes on."""

import argparse
import asyncio
from urllib.parse import quote

from kilat.cli.client import Client


def run(args: argparse.Namespace) -> int:
    """Ask the server, wait until the worker has ended, and say what happened."""
    print(asyncio.run(_drain(args)))
    return 0


async def _drain(args: argparse.Namespace) -> str:
    async with Client(args.url, api_key=args.api_key) as client:
        path = f"/cluster/workers/{quote(args.worker, safe='')}/drain"
        told = (await client.complete(path, {"restart": args.restart})).body
    end = "a new one is starting in its place" if told["restarted"] else "it has ended"
    return f"{told['worker']}: {told['moved_sessions']} sessions moved to other workers; {end}"
