"""A measurement as a table for people and as JSON with everything that is needed to compare it."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

import kilat
from kilat.cli.machine import read_machine, source_sha

PLAIN_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured. Values of None are not known: a server given by URL does not tell them."""

    model: str
    device: str | None
    dtype: str | None
    threads: int | None
    kernels: str | None


def envelope(args: argparse.Namespace, subject: Subject, **fields: Any) -> dict[str, Any]:
    """The JSON document of a measurement: where, what and with which settings, then ``fields`` (shapes,
    rounds, spread).
    """
    machine = read_machine()
    return {
        "bench": args.kind,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kilat": kilat.__version__,
        "sha": source_sha(),
        "cpu": machine.cpu,
        "isa": machine.isa,
        "cores": machine.cores,
        "seed": args.seed or 0,
        **msgspec.to_builtins(subject),
        **fields,
    }


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write the document to ``path``, if there is one; numbers keep 6 decimals."""
    if path is not None:
        text = msgspec.json.format(msgspec.json.encode(_rounded(document)), indent=1)
        path.write_bytes(text + b"\n")


def print_table(
    title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], *, n_text: int = 1
) -> None:
    """A table on standard output; the first ``n_text`` columns are text, the others are numbers."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < n_text else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value
