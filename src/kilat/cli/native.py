"""`kilat native MODEL -p TEXT`: one prompt and one stream in the native runtime, without the engine and without torch."""

import argparse
import codecs
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kilat.base.errors import ConfigError
from kilat.cli.fetch import fetch
from kilat.cli.kernels import told_when_slow
from kilat.cli.text import n_bytes_text
from kilat.load.files import ModelFiles
from kilat.native import library
from kilat.native.runtime import MemoryOwner, NativeModel, NativeSession, Sampling


@dataclass(slots=True)
class _Clock:
    """Seconds on ``time.perf_counter``."""

    begin: float
    opened: float = 0.0
    ready: float = 0.0
    first: float = 0.0


def run(args: argparse.Namespace) -> int:
    """Exit status 0; errors are raised."""
    files = fetch(args.model)
    given = args.library and args.library.resolve()  # the loader looks for a bare name elsewhere
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    with told_when_slow("building the native runtime, once: up to a minute"):
        library.load(given)  # built now if it was not, which is no part of the times
    clock = _Clock(time.perf_counter())
    with NativeModel(
        files.path,
        device=args.device,
        threads=args.threads,
        dtype=args.dtype,
        weights=args.weights,
        library=given,
    ) as model:
        clock.opened = time.perf_counter()
        prompt, text = _read(files, model, args)
        if not prompt:
            raise ConfigError("the prompt is empty: give --prompt some text to go on with")
        with model.session(args.context, run_ahead=True) as session:
            clock.ready = time.perf_counter()
            if len(prompt) > session.context:
                raise ConfigError(
                    f"the prompt has {len(prompt):,} tokens, the context is {session.context:,}: shorten it, or give --context, "
                    f"at most {model.info.max_context:,}"
                )
            end = () if args.ignore_eos else model.info.end_ids
            most = min(args.max_tokens, session.context - len(prompt) + 1)
            n = 0
            for token in _stream(session, prompt, sampling, most):
                n += 1
                clock.first = clock.first or time.perf_counter()
                if token in end:
                    break
                print(text.push([token]), end="", flush=True)
            print(text.finish())
            done = time.perf_counter()
            if args.stats:
                _report(model, session, clock, done, n)
    return 0


class _Text(Protocol):
    """Ids to text, as they come."""

    def push(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class _RuntimeText:
    """What the runtime's own tokenizer says of ids; control tokens are their names."""

    def __init__(self, model: NativeModel) -> None:
        self._bytes_of = model.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: list[int]) -> str:
        return self._decode(b"".join(map(self._bytes_of, ids)))

    def finish(self) -> str:
        return self._decode(b"", True)


def _read(files: ModelFiles, model: NativeModel, args: argparse.Namespace) -> tuple[list[int], _Text]:
    """Ids of the prompt and the text of the answer: with the runtime's tokenizer if it has the model's, for it is open already and
    the text package's takes longer to build than a small model to answer.
    """
    if files.kind == "gguf" and not args.chat:
        try:
            return model.encode(args.prompt), _RuntimeText(model)
        except ConfigError:  # a tokenizer that only the text package knows
            pass
    return _read_slowly(files, args)


def _read_slowly(files: ModelFiles, args: argparse.Namespace) -> tuple[list[int], _Text]:
    from kilat.text.detokenize import StreamDetokenizer
    from kilat.text.template import load_template
    from kilat.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_files(files)
    text = StreamDetokenizer(tokenizer, skip_special=False)
    if not args.chat:
        return tokenizer.encode(args.prompt), text
    template = load_template(files, tokenizer)
    if template is None:
        raise ConfigError("the model has no chat template: leave --chat out, and give the whole prompt")
    message = {"role": "user", "content": args.prompt}
    return tokenizer.encode(template.render([message]), add_special=False), text


def _stream(session: NativeSession, prompt: list[int], sampling: Sampling, most: int) -> Iterator[int]:
    token = session.prefill(prompt, sampling)
    assert token is not None
    yield token
    for _ in range(most - 1):
        token = session.step(token, sampling)
        assert token is not None
        yield token


def _report(model: NativeModel, session: NativeSession, clock: _Clock, done: float, n: int) -> None:
    """Times and memory, on stderr."""
    decode = f", decode {(n - 1) / (done - clock.first):,.1f} tokens/s" if n > 1 else ""
    print(
        f"{model.info.kernels}, {model.info.dtype}, weights {model.info.weights}: load {clock.opened - clock.begin:.3f} s, session "
        f"{clock.ready - clock.opened:.3f} s, first token {clock.first - clock.ready:.3f} s{decode}",
        file=sys.stderr,
    )
    owners = [o for o in model.memory(session) if o.host_bytes or o.device_bytes]
    total = MemoryOwner("all", sum(o.host_bytes for o in owners), sum(o.device_bytes for o in owners))
    for o in (*owners, total):
        on_device = f" {n_bytes_text(o.device_bytes):>12} on the device" if total.device_bytes else ""
        print(f"{o.owner:12} {n_bytes_text(o.host_bytes):>12}{on_device}", file=sys.stderr)
