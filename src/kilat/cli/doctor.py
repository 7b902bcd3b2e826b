"""`kilat doctor [MODEL]`: what this machine is, which kernels it gets and why, and whether a model fits into
its memory.
"""

import argparse
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

import kilat
from kilat.base.env import cache_dir
from kilat.base.errors import KilatError
from kilat.cli.fetch import find
from kilat.cli.fit import Fit, predict
from kilat.cli.machine import Machine, read_machine, source_sha
from kilat.cli.options import engine_options
from kilat.cli.progress import spinner
from kilat.cli.text import n_bytes_text
from kilat.engine.config import EngineConfig
from kilat.load.files import ModelFiles

if TYPE_CHECKING:
    from kilat.ops.kernels import Kernels

PACKAGES = ("torch", "numpy", "tokenizers", "llguidance", "uvicorn", "pyzmq")
LOW_DISK_BYTES = 2 << 30
LEAST_TOKENS = 1024  # a context below this is of no use


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``fix`` says what to do about it, empty when all is well."""

    what: str
    value: str
    fix: str = ""


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when nothing is in the way of serving, 1 when the model does not fit or cannot be
    read.
    """
    from kilat.engine.build import choose_device, choose_kernels

    machine = read_machine()
    settings = EngineConfig(
        model_path="", model_kind="gguf", model_id=args.model or "", **engine_options(args)
    )
    with spinner("looking at the kernels (built the first time: up to a minute)"):
        threads = settings.threads or machine.cores
        device = choose_device(settings.device)
        chosen = choose_kernels(settings.kernels, device, threads, exact=settings.deterministic)
    _show(machine_findings(machine))
    _show(kernel_findings(chosen, settings))
    _show(software_findings())
    if args.model is None:
        return 0
    return _model(args.model, settings, chosen, machine)


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """CPU, cores, memory, disk, accelerators."""
    isa = " ".join(machine.isa) or "none that the kernels use"
    wanted = {"avx2", "asimd"} & set(machine.isa)
    yield Finding("cpu", machine.cpu)
    yield Finding("instructions", isa, "" if wanted else "a CPU with AVX2 or newer is many times faster")
    yield Finding(
        "cores",
        str(machine.cores),
        "" if machine.cores > 1 else "one core serves and computes: expect pauses",
    )
    memory = f"{n_bytes_text(machine.memory_bytes)}, {n_bytes_text(machine.free_bytes)} free"
    yield Finding("memory", memory)
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding("gpu", names)
    else:
        yield Finding("gpu", "none that torch can see")
    folder = cache_dir()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    fix = (
        ""
        if os.access(there, os.W_OK)
        else f"{there} cannot be written: set KILAT_CACHE_DIR to another folder"
    )
    if free < LOW_DISK_BYTES:
        fix = "models may not fit: make room, or set KILAT_CACHE_DIR to another disk"
    yield Finding("cache", f"{folder}, {n_bytes_text(free)} free", fix)


def kernel_findings(chosen: "Kernels", settings: EngineConfig) -> Iterator[Finding]:
    """The kernel set and the reason it was taken."""
    reference = chosen.name.endswith("reference")
    fix = (
        "many times slower than native kernels: mend what the reason says, then start again"
        if reference and settings.kernels == "auto"
        else ""
    )
    yield Finding("kernels", f"{chosen.name} ({chosen.why})", fix)
    same = "yes: a request gets the same tokens alone and in any batch" if chosen.batch_invariant else "no"
    yield Finding("batch-invariant", same)


def software_findings() -> Iterator[Finding]:
    """Versions."""
    sha = source_sha()
    yield Finding("kilat", kilat.__version__ + (f", commit {sha}" if sha else ""))
    yield Finding("python", f"{platform.python_version()}, {platform.system()} {platform.release()}")
    yield Finding("packages", ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))


def _model(name: str, settings: EngineConfig, chosen: "Kernels", machine: Machine) -> int:
    try:
        files: ModelFiles = find(name)
        fit = predict(files, settings, chosen, machine)
    except KilatError as e:
        _show([Finding(name, "cannot be served", e.message)])
        return 1
    _show(fit_findings(files.name, fit))
    return 0 if fit.fits else 1


def fit_findings(name: str, fit: Fit) -> Iterator[Finding]:
    """The memory ledger as predicted, and how much of the machine it takes."""
    yield Finding(name, f"on {fit.device} in {fit.dtype}, {fit.max_model_len:,} tokens of context")
    for owner, n_bytes in fit.ledger_bytes.items():
        yield Finding(f"  {owner}", n_bytes_text(n_bytes))
    sessions = fit.kv_tokens / fit.max_model_len
    yield Finding("  KV cache holds", f"{fit.kv_tokens:,} tokens: {sessions:.1f} sessions of full length")
    total = f"{n_bytes_text(fit.total_bytes)} of {n_bytes_text(fit.free_bytes)} free"
    yield Finding("  together", total, "" if fit.fits else _advice(fit))


def _advice(fit: Fit) -> str:
    left = fit.free_bytes - (fit.total_bytes - fit.ledger_bytes["pages"])
    tokens = left // fit.kv_token_bytes
    if tokens >= LEAST_TOKENS:
        size, length = n_bytes_text(left).replace(" ", ""), min(tokens, fit.max_model_len)
        return f"does not fit; --kv-cache-memory-bytes {size} --max-model-len {length} would"
    if fit.dtype == "float32":
        return "does not fit; --dtype bfloat16 halves weights and cache"
    missing = n_bytes_text(LEAST_TOKENS * fit.kv_token_bytes - left)
    return f"does not fit; free {missing} of memory, or take a smaller model"


def _show(findings: "Iterator[Finding] | list[Finding]") -> None:
    console = Console(highlight=False, soft_wrap=True)
    for f in findings:
        mark = "[yellow]warn[/yellow]" if f.fix else "[green]ok  [/green]"
        console.print(f"{mark} {escape(f.what):<17} {escape(f.value)}")
        if f.fix:
            console.print(f"     {'':<17} fix: {escape(f.fix)}")
