"""`kilat model list | pull | info`."""

import argparse
import time

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.console import Console
from rich.table import Table

from kilat.cli.facts import DTYPE_BYTES, ModelFacts, read_facts
from kilat.cli.fetch import fetch, find
from kilat.cli.report import print_table
from kilat.cli.text import count_text, n_bytes_text
from kilat.load.sources import catalogue

# fields of the config that people ask for, where the model has them
SHAPE_FIELDS = (
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden size"),
    ("intermediate_size", "MLP size"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "KV heads"),
    ("vocab_size", "vocabulary"),
)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; errors are raised."""
    {"list": _list, "pull": _pull, "info": _info}[args.verb](args)
    return 0


def _list(args: argparse.Namespace) -> None:
    lines = [
        [e.name, e.title, e.license, "yes" if e.cached else "no", n_bytes_text(e.n_bytes)]
        for e in catalogue()
    ]
    lines += [
        [name, "from the Hugging Face hub", "", "yes", n_bytes_text(size)] for name, size in _hub_models()
    ]
    print_table("models", ("name", "", "license", "on disk", "size"), lines, n_text=4)


def _hub_models() -> list[tuple[str, int]]:
    """Models in the hub library's cache that have weights kilat reads: id and bytes on disk."""
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = [
        (repo.repo_id, repo.size_on_disk)
        for repo in cache.repos
        if repo.repo_type == "model"
        and any(f.file_name.endswith(".safetensors") for r in repo.revisions for f in r.files)
    ]
    return sorted(found)


def _pull(args: argparse.Namespace) -> None:
    began = time.monotonic()
    files = fetch(args.model)
    facts = read_facts(files)
    size = n_bytes_text(facts.stored_bytes)
    print(
        f"{files.name}: {size}, {count_text(facts.parameters)} parameters, {time.monotonic() - began:.1f} s"
    )
    print(f"kilat chat {args.model}")


def _info(args: argparse.Namespace) -> None:
    facts = read_facts(find(args.model))
    table = Table(show_header=False, box=None)
    for name, value in _info_lines(facts):
        table.add_row(name, value)
    Console().print(table)


def _info_lines(facts: ModelFacts) -> list[tuple[str, str]]:
    lines = [("name", facts.name), ("architecture", facts.architecture)]
    lines.append(("parameters", f"{facts.parameters:,}"))
    lines += [(text, f"{facts.config[key]:,}") for key, text in SHAPE_FIELDS if facts.config.get(key)]
    lines.append(("context", f"{facts.context:,} tokens"))
    lines.append(("in the file", n_bytes_text(facts.stored_bytes)))
    for kind, (tensors, values, n_bytes) in facts.formats.items():
        bits = n_bytes * 8 / max(values, 1)
        lines.append(
            (
                f"  {kind}",
                f"{tensors} tensor{'s' * (tensors != 1)}, {n_bytes_text(n_bytes)}, {bits:.2f} bits per value",
            )
        )
    for dtype, width in DTYPE_BYTES:
        lines.append((f"in {dtype}", n_bytes_text(facts.parameters * width)))
    for dtype, width in DTYPE_BYTES:
        full = n_bytes_text(facts.kv_values * width * facts.context)
        lines.append(
            (f"KV, {dtype}", f"{facts.kv_values * width:,} bytes per token, {full} for a full context")
        )
    return lines
