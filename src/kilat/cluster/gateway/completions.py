"""POST /v1/completions: text that goes on after one or more prompts, whole or in chunks."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from kilat.base.errors import LimitError
from kilat.cluster.gateway.answer import EventStream, Pieces, WholeAnswer, sse, usage
from kilat.cluster.gateway.chat_format import Frame
from kilat.cluster.gateway.generation import check_prompts
from kilat.cluster.gateway.limits import read_json_body
from kilat.cluster.gateway.logprobs import prompt_logprobs, text_logprobs
from kilat.cluster.gateway.params import completion_params
from kilat.cluster.gateway.prompt import PromptBuilder, split_prompts
from kilat.cluster.gateway.protocol import CompletionRequest, parse
from kilat.cluster.gateway.sample import Piece
from kilat.cluster.gateway.serving import gateway_of
from kilat.text.detokenize import StreamDetokenizer
from kilat.wire.messages import TokenLogprob

MAX_SESSIONS = 1024


async def completions(request: Request) -> EventStream | WholeAnswer:
    """Handler of the route."""
    gateway = gateway_of(request)
    hello, builder = gateway.admit()
    ask = parse(await read_json_body(request), CompletionRequest)
    gateway.check_model(ask.model)
    params = completion_params(ask, vocab_size=hello.vocab_size)
    prompts, echoes = await _prompts(builder, ask)
    check_prompts(prompts, max_model_len=hello.max_model_len, vocab_size=hello.vocab_size, param="prompt")
    if len(prompts) * params.n > MAX_SESSIONS:
        raise LimitError(
            f"{len(prompts)} prompts with n {params.n} are too many, limit {MAX_SESSIONS}", param="n"
        )
    generation = gateway.start(request, prompts, params, ask, prefix="cmpl")
    frame = Frame(gateway.config.served_model_name, gateway.fingerprint, generation, builder.tokenizer)
    text = TextForm(frame, ask, echoes)
    if ask.stream:
        include_usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
        return EventStream(gateway, generation, TextStream(text, include_usage=include_usage))
    return WholeAnswer(gateway, generation, TextWhole(text, prompt_logprobs=ask.prompt_logprobs is not None))


async def _prompts(builder: PromptBuilder, ask: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and the text to repeat for ``echo`` (empty without)."""
    texts, ids = split_prompts(ask.prompt)
    if texts:
        ids = await builder.texts(texts, add_special=ask.add_special_tokens is not False)
    elif ask.echo:
        texts = [builder.tokenizer.decode(p, skip_special=False) for p in ids]
    return ids, texts if ask.echo else [""] * len(ids)


class TextForm:
    """How pieces of samples become choices of a text completion; the same for chunks and for whole answers."""

    def __init__(self, frame: Frame, ask: CompletionRequest, echoes: Sequence[str]) -> None:
        self.frame = frame
        self.generation = frame.generation
        self._echo = bool(ask.echo)
        self._echoes = echoes
        # Special tokens that were put around a text are not in the text that is repeated.
        self._from_text = bool(split_prompts(ask.prompt)[0])
        self._logprobs = ask.logprobs is not None
        self._scoring = self._echo and ask.max_tokens == 0
        n_samples = len(frame.generation.samples)
        self._begun = [False] * n_samples
        self._n_told = [0] * n_samples

    @property
    def plain(self) -> bool:
        """Pieces are text and nothing else."""
        return not self._logprobs and not self._echo

    def choice(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The choice that tells ``piece``, or None when there is nothing to tell."""
        logprobs: Sequence[TokenLogprob] = () if self._scoring else piece.logprobs
        text = "" if self._scoring else piece.text
        told = self._told(index, logprobs)
        if not self._begun[index]:
            self._begun[index] = True
            text = self._echoes[index // self.generation.job.params.n] + text
        if not text and not logprobs and piece.finish is None:
            return None
        return {
            "index": index,
            "text": text,
            "logprobs": told,
            "finish_reason": "length" if self._scoring and piece.finish else piece.finish,
            "stop_reason": self.generation.samples[index].stop_reason,
        }

    def _told(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The logprobs of these output tokens; of the prompt's tokens too when it is repeated and this is the first piece."""
        if not self._logprobs:
            return None
        p = index // self.generation.job.params.n
        at = self._n_told[index]
        self._n_told[index] += len(logprobs)
        ids = [t.token_id for t in logprobs]
        tokens: list[TokenLogprob | None] = list(logprobs)
        before = len(self._echoes[p])
        offsets = [before + o for o in self.generation.samples[index].text_offsets[at : at + len(ids)]]
        if self._echo and not self._begun[index]:
            prompt = self.generation.job.prompts[p]
            ids = [*prompt, *ids]
            tokens = [*(self.generation.prompt_logprobs[p] or [None] * len(prompt)), *tokens]
            offsets = [*self._prompt_offsets(prompt), *offsets]
        return text_logprobs(self.frame.tokenizer, ids, tokens, offsets)

    def _prompt_offsets(self, prompt: Sequence[int]) -> Sequence[int]:
        detokenizer = StreamDetokenizer(self.frame.tokenizer, skip_special=self._from_text)
        detokenizer.push(prompt)
        return detokenizer.text_offsets

    @property
    def output_tokens(self) -> int:
        return 0 if self._scoring else self.generation.output_tokens


class TextStream:
    """Chunks of a text completion."""

    def __init__(self, form: TextForm, *, include_usage: bool) -> None:
        self._form = form
        self._usage: dict[str, object] = {"usage": None} if include_usage else {}
        mark = "\0"
        chunks = [
            self._chunk(
                {"index": i, "text": mark, "logprobs": None, "finish_reason": None, "stop_reason": None}
            )
            for i in range(len(form.generation.samples))
        ]
        self._halves = [tuple(c.split(msgspec.json.encode(mark))) for c in chunks]

    def chunks(self, pieces: Pieces) -> bytes:
        out: list[bytes] = []
        for index, piece in pieces:
            if self._form.plain and piece.finish is None:
                if piece.text:
                    head, tail = self._halves[index]
                    out += (head, msgspec.json.encode(piece.text), tail)
                continue
            choice = self._form.choice(index, piece)
            if choice is not None:
                out.append(self._chunk(choice))
        return b"".join(out)

    def end(self) -> bytes:
        if not self._usage:
            return b""
        told = usage(self._form.generation, output_tokens=self._form.output_tokens)
        return sse(self._form.frame.body("text_completion", [], usage=told))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse(self._form.frame.body("text_completion", [choice], **self._usage))


class TextWhole:
    """A text completion in one body."""

    def __init__(self, form: TextForm, *, prompt_logprobs: bool) -> None:
        self._form = form
        self._pieces: list[Piece | None] = [None] * len(form.generation.samples)
        self._prompt_logprobs = prompt_logprobs

    def add(self, pieces: Pieces) -> None:
        for index, piece in pieces:
            before = self._pieces[index]
            self._pieces[index] = piece if before is None else before.joined(piece)

    def body(self) -> object:
        generation = self._form.generation
        choices = [self._form.choice(i, p) for i, p in enumerate(self._pieces) if p is not None]
        if self._prompt_logprobs:
            for i, choice in enumerate(choices):
                found = generation.prompt_logprobs[i // generation.job.params.n] or []
                assert choice is not None
                choice["prompt_logprobs"] = prompt_logprobs(self._form.frame.tokenizer, found)
        told = usage(generation, output_tokens=self._form.output_tokens)
        return self._form.frame.body("text_completion", choices, usage=told)
