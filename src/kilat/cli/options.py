"""What a flag accepts, and the engine flags that several commands share. Standard library only, so that
``--help`` is quick.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kilat.base.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(i?[bB])?|[bB])?")
_POWER = "kmgt"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit status 2, and which takes no abbreviated
    flags.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, want a whole number from {low} to {high}"
            ) from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"got {value}, allowed {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """A number from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, want a number from {low:g} to {high:g}"
            ) from None
        if not low <= value <= high:  # also catches nan
            raise argparse.ArgumentTypeError(f"got {text}, allowed {low:g} to {high:g}")
        return value

    return parse


def amount(low: int, high: int) -> Callable[[str], int]:
    """A count with an optional unit, as vLLM reads them: ``4096``, ``4k`` (4,000), ``4K`` or ``4KiB``
    (4,096), ``2GiB``.
    """

    def parse(text: str) -> int:
        found = _SIZE.fullmatch(text.strip())
        if not found:
            raise argparse.ArgumentTypeError(f"got {text!r}, want a number such as 4096, 4K or 2GiB")
        digits, unit, suffix = found.groups()
        # k and kB count in thousands, K and KiB in 1,024.
        decimal = suffix.lower() == "b" if suffix else (unit or "").islower()
        base = 1000 if decimal else 1024
        value = float(digits) * (base ** (_POWER.index(unit.lower()) + 1) if unit else 1)
        if value != int(value) or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"got {text} = {value:,g}, allowed whole numbers from {low:,} to {high:,}"
            )
        return int(value)

    return parse


def lengths(text: str) -> list[int]:
    """Numbers of words or tokens, joined by commas: ``32,256,1K``."""
    return [amount(1, 2**20)(part) for part in text.split(",")]


def input_file(text: str) -> Path:
    """The path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"got {text!r}, which is not a file")
    return path


def output_file(text: str) -> Path:
    """The path of a file that can be made: its folder exists and it is no folder itself."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, want the path of a file in a folder that exists")
    return path


def server_url(text: str) -> str:
    """``http://host:port`` of a server, without the trailing ``/v1`` that people paste with it."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, want http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def slo(text: str) -> dict[str, float]:
    """Limits in milliseconds, ``ttft=500,tpot=50,e2e=10000``; names may be left out."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot", "e2e") or not re.fullmatch(r"\d+(\.\d+)?", value):
            raise argparse.ArgumentTypeError(
                f"got {part!r}, want ttft=MS, tpot=MS or e2e=MS, joined by commas"
            )
        limits[name] = float(value)
    return limits


def engine_flags() -> tuple[tuple[str, dict[str, Any]], ...]:
    """The engine's flags, named as vLLM names them; ``dest`` is the field of ``EngineConfig``. None means:
    not given.
    """
    return (
        ("--dtype", {"choices": ("auto", "float32", "bfloat16"), "help": "type of weights and activations"}),
        (
            "--quant",
            {
                "choices": ("auto", "none", "fp8"),
                "help": "linear weights: fp8 halves them, auto is what the model has",
            },
        ),
        (
            "--kv-cache-dtype",
            {"choices": ("auto", "fp8"), "dest": "kv_dtype", "help": "type of KV pages; auto is --dtype"},
        ),
        (
            "--device",
            {"choices": ("auto", "cpu", "cuda"), "help": "auto takes a CUDA device if there is one"},
        ),
        ("--max-model-len", _amount("tokens of prompt and answer together", 1, 2**24)),
        ("--max-num-seqs", _integer("requests that run at the same time", 1, 65536)),
        ("--max-num-batched-tokens", _amount("tokens per step", 1, 2**20, "max_step_tokens")),
        ("--seed", _integer("seed of everything random", 0, 2**63 - 1)),
        (
            "--enable-prefix-caching",
            {
                "action": argparse.BooleanOptionalAction,
                "dest": "prefix_cache",
                "help": "reuse pages of equal prompt beginnings",
            },
        ),
        ("--block-size", _integer("tokens per KV page", 1, 256, "page_tokens")),
        ("--kv-cache-memory-bytes", _amount("memory for KV pages, e.g. 2GiB", 1, 2**50, "kv_cache_bytes")),
        ("--threads", _integer("threads of the compute kernels", 1, 1024)),
        (
            "--kernels",
            {
                "metavar": "NAME",
                "help": "kernel set (auto, reference, ...); kilat doctor shows what auto takes",
            },
        ),
        (
            "--deterministic",
            {
                "action": "store_true",
                "help": "batch-invariant kernels on every device (the CPU's always are)",
            },
        ),
        ("--max-waiting", _integer("requests that may wait before new ones get 429", 0, 2**20)),
    )


def ray_flags() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Flags of ``serve`` for workers that Ray places; all but the first need it."""
    return (
        (
            "--ray",
            {
                "metavar": "ADDRESS",
                "help": "run the workers on the hosts of this Ray, HOST:PORT; auto: the one of this host, or a new one",
            },
        ),
        (
            "--control-host",
            {
                "metavar": "HOST",
                "help": "address of this host that workers of other hosts connect to (default: loopback, no other hosts)",
            },
        ),
        (
            "--worker-cpus",
            {
                "type": number(0, 4096),
                "metavar": "N",
                "help": "processors of its host that each worker takes, and its threads (default 1)",
            },
        ),
        (
            "--worker-gpus",
            {
                "type": number(0, 64),
                "metavar": "N",
                "help": "GPUs of its host that each worker takes (default 0)",
            },
        ),
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given engine flags as ``EngineConfig`` fields; what was not given is left to ``EngineConfig``."""
    fields = (_dest(flag, kwargs) for flag, kwargs in engine_flags())
    return {f: getattr(args, f) for f in fields if getattr(args, f, None) is not None}


def engine_argv(args: argparse.Namespace) -> list[str]:
    """The given engine flags as arguments of another ``kilat`` command."""
    argv: list[str] = []
    for flag, kwargs in engine_flags():
        value = getattr(args, _dest(flag, kwargs), None)
        if value is True or value is False:
            argv.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif value is not None:
            argv += [flag, str(value)]
    return argv


def read_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """API keys from flags and from a file with one key a line (``#`` begins a comment line)."""
    keys = list(given)
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"the --api-key-file {file} cannot be read ({why}): write one key a line"
            ) from e
        lines = (line.strip() for line in text.splitlines())
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError("the --api-key-file holds no key: write one key a line")
        keys += found
    return tuple(keys)


def _integer(text: str, low: int, high: int, dest: str | None = None) -> dict[str, Any]:
    return _typed(integer(low, high), text, "N", dest)


def _amount(text: str, low: int, high: int, dest: str | None = None) -> dict[str, Any]:
    return _typed(amount(low, high), text, "N", dest)


def _typed(kind: Callable[[str], object], text: str, metavar: str, dest: str | None) -> dict[str, Any]:
    return {"type": kind, "help": text, "metavar": metavar, **({"dest": dest} if dest else {})}


def _dest(flag: str, kwargs: dict[str, Any]) -> str:
    return kwargs.get("dest") or flag.removeprefix("--").replace("-", "_")
