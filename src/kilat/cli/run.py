"""`kilat run IN.jsonl OUT.jsonl`: answer every row of a file once, however often the run is killed and
started again.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kilat.base.errors import CapacityError, ConfigError, KilatError, PeerError
from kilat.cli import rows
from kilat.cli.client import Client
from kilat.cli.journal import Journal, open_journal
from kilat.cli.progress import RowBar
from kilat.cli.server import Target, check_target, target

SYNC_INTERVAL_S = 0.25
BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 30.0


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when every row has an answer, 1 when some are errors or the server was lost."""
    source, out = args.input, args.output
    check_target(args)
    if out.exists() and out.samefile(source):
        raise ConfigError("IN and OUT are the same file: choose another OUT")
    identity, ids = rows.index(source, args.model)
    journal = open_journal(out, identity)
    try:
        if journal.cut_bytes:
            print(
                f"kilat run: cut {journal.cut_bytes:,} bytes of an unfinished row off {out.name}",
                file=sys.stderr,
            )
        strange = journal.done - ids
        if strange:
            raise ConfigError(
                f"{out.name} has row {min(strange)!r}, which the input has not: choose another OUT"
            )
        if len(journal.done) < len(ids):
            with target(args) as server:
                batch = Batch(
                    server, args.model is not None, args.concurrency, args.retries, args.row_timeout
                )
                asyncio.run(batch.run(rows.read(source), len(ids), journal))
    except KeyboardInterrupt:
        print(
            f"kilat run: stopped with {len(journal.done)} of {len(ids)} rows; run it again to go on",
            file=sys.stderr,
        )
        raise
    finally:
        journal.close()
    print(
        f"kilat run: {len(ids):,} rows in {out.name}, {len(journal.failed):,} of them errors", file=sys.stderr
    )
    return 1 if journal.failed else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """How rows are sent. ``replace_model``: the server's model answers rows that name another one too."""

    server: Target
    replace_model: bool
    concurrency: int
    retries: int
    row_timeout_s: float

    async def run(self, todo: Iterator[rows.Row], total: int, journal: Journal) -> None:
        """Send every row that the journal does not have and append what comes back. Raises PeerError when the
        server is lost.
        """
        before = frozenset(journal.done)
        left = (row for row in todo if row.custom_id not in before)
        n_lanes = min(self.concurrency, total - len(before))
        client = Client(
            self.server.url,
            api_key=self.server.api_key,
            timeout_s=self.row_timeout_s,
            connections=n_lanes + 1,
        )

        async def lane() -> None:
            for row in left:  # one iterator for all lanes
                journal.append(await self.answer(client, row))
                bar.advance()

        with RowBar("rows", total, len(before)) as bar:
            try:
                async with client, asyncio.TaskGroup() as group:
                    syncing = group.create_task(_sync(journal))
                    async with asyncio.TaskGroup() as lanes:
                        for _ in range(n_lanes):
                            lanes.create_task(lane())
                    syncing.cancel()
            except ExceptionGroup as e:
                raise _first(e) from None

    async def answer(self, client: Client, row: rows.Row) -> dict[str, Any]:
        """The output row of ``row``: its answer, or the error that is left after all tries."""
        model = {"model": self.server.model}
        body = {**row.body, **model} if self.replace_model else {**model, **row.body}
        for attempt in range(self.retries + 1):
            try:
                reply = await client.complete(row.path, body)
                return _output(row, _response(reply.status, reply.request_id, reply.body), None)
            except KilatError as e:
                error = e
            self.server.require_process()
            if not error.retryable or attempt == self.retries:
                break
            await asyncio.sleep(_backoff_s(error, attempt))
        if isinstance(error, PeerError):
            await _require_answer(client, error)
        response = _response(error.status, "", None) if error.status else None
        return _output(row, response, {"code": error.code, "message": error.message})


async def _require_answer(client: Client, error: KilatError) -> None:
    """A row is only to blame for a lost answer when the server still answers others; else the run must
    stop.
    """
    try:
        await client.model_ids()
    except PeerError:
        raise PeerError(
            f"the server is lost ({error.message}): finished rows are kept, run it again to go on"
        ) from error


def _backoff_s(error: KilatError, attempt: int) -> float:
    wait = min(BACKOFF_FIRST_S * 2**attempt, BACKOFF_LAST_S)
    if isinstance(error, CapacityError):
        wait = max(wait, min(error.retry_after_s, BACKOFF_LAST_S))
    return wait * random.uniform(0.75, 1.25)  # so that the lanes do not come back all at once


def _response(status: int, request_id: str, body: dict[str, Any] | None) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _output(row: rows.Row, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{row.custom_id}",
        "custom_id": row.custom_id,
        "response": response,
        "error": error,
    }


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _sync(journal: Journal) -> None:
    while True:
        await asyncio.sleep(SYNC_INTERVAL_S)
        await asyncio.to_thread(journal.sync)
