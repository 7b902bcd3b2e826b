"""Load on a server: streams that start at given times, or from clients that each keep one stream open."""

import asyncio
import time
from collections.abc import Callable, Sequence

from kilat.base.errors import KilatError
from kilat.cli.client import Client
from kilat.cli.measures import Sample
from kilat.cli.rows import COMPLETIONS
from kilat.cli.server import Target
from kilat.cli.workload import Request

Done = Callable[[], None]


async def open_loop(
    server: Target, requests: Sequence[Request], arrivals_s: Sequence[float], on_done: Done
) -> list[Sample]:
    """Send request i at ``arrivals_s[i]`` seconds from now, however many are open. Samples in the order of
    the requests.
    """
    async with _client(server, len(requests)) as client:
        start = time.perf_counter()

        async def one(request: Request, due_s: float) -> Sample:
            await asyncio.sleep(max(start + due_s - time.perf_counter(), 0.0))
            sample = await stream_one(client, server.model, request, start + due_s)
            on_done()
            return sample

        return await asyncio.gather(*(one(r, t) for r, t in zip(requests, arrivals_s, strict=True)))


async def closed_loop(
    server: Target, requests: Sequence[Request], n_clients: int, on_done: Done
) -> list[Sample]:
    """``n_clients`` clients, each with one stream open, until all requests are sent. Samples in the order of
    their ends.
    """
    samples: list[Sample] = []
    left = iter(requests)

    async with _client(server, n_clients) as client:

        async def one_client() -> None:
            for request in left:
                samples.append(await stream_one(client, server.model, request, None))
                on_done()

        await asyncio.gather(*(one_client() for _ in range(n_clients)))
    return samples


async def stream_one(client: Client, model: str, request: Request, due_s: float | None) -> Sample:
    """One greedy stream of exactly ``request.output_tokens`` tokens. ``due_s`` on time.perf_counter, None for
    now. Never raises for a failed request: the sample says why.
    """
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    sent = time.perf_counter()
    due = sent if due_s is None else due_s
    times: list[float] = []
    usage = finished = None
    try:
        async for chunk in client.stream(COMPLETIONS, body):
            if chunk.text or chunk.reasoning:
                times.append(chunk.at_s)
            if chunk.finish is not None:
                finished = chunk.at_s
            usage = chunk.usage or usage
    except KilatError as e:
        return Sample(due, sent, time.perf_counter(), tuple(times), error=f"{e.code}: {e.message}")
    done = time.perf_counter()
    n_tokens = usage.completion_tokens if usage is not None else len(times)
    if n_tokens == 0:
        return Sample(due, sent, done, error="empty: the answer has no tokens")
    if n_tokens > len(times):
        # Special tokens and halves of characters have no text of their own; the last was there at the end.
        times.append(finished or done)
    n_input, n_cached = (usage.prompt_tokens, usage.cached_tokens) if usage is not None else (0, 0)
    return Sample(due, sent, done, tuple(times), n_input, n_tokens, n_cached)


def _client(server: Target, connections: int) -> Client:
    return Client(server.url, api_key=server.api_key, connections=connections)
