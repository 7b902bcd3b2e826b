"""The offline Python API: a model in this process, prompts in, completions out. The same engine as the server's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kilat.base.errors import EngineError, KilatError, RequestError
from kilat.base.ids import branch_id, new_seed, new_session_id
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.load.sources import Progress, resolve
from kilat.text.detokenize import StreamDetokenizer
from kilat.text.template import load_template
from kilat.text.tokenizer import Tokenizer
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Sample:
    """One continuation. ``finish_reason`` is ``stop`` or ``length``; ``stop_reason`` the stop string or token id that ended it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Completion:
    """A prompt's continuations, ``n`` of them. ``cached_tokens``: prompt tokens that came from the prefix cache."""

    prompt_ids: list[int]
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text


class LLM:
    """A model ready to generate. ``model`` is a catalogue name, a .gguf file, a Hugging Face directory or a hub id.

    ``options`` are fields of :class:`EngineConfig` (``dtype``, ``max_model_len``, ``max_num_seqs``, ...). Not thread-safe: one caller at a
    time. Use as a context manager or call :meth:`close`.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any) -> None:
        files = resolve(model, progress)
        self.tokenizer = Tokenizer.from_files(files)
        self.template = load_template(files, self.tokenizer)
        options.setdefault("max_waiting", 1_000_000)
        options.setdefault(
            "target_step_s", 60.0
        )  # nobody watches a stream here: the largest steps are the fastest
        config = EngineConfig(
            model_path=str(files.path), model_kind=files.kind, model_id=files.name, **options
        )
        self.engine = build_engine(config, tokenizer_json=self.tokenizer.to_json())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text or token ids); results come in the order of the prompts.

        One SamplingParams serves all prompts, a list one each. ``on_finish(index, completion)`` is called as prompts finish. Raises
        RequestError for a bad prompt or parameter before anything runs.
        """
        many = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params)
        if len(each) != len(many):
            raise RequestError(
                f"{len(many)} prompts but {len(each)} sampling parameters; give one, or one each",
                param="params",
            )
        jobs = [self._job(p, s) for p, s in zip(many, each)]
        owner = {
            branch_id(j.record.session_id, k): (i, k)
            for i, j in enumerate(jobs)
            for k in range(j.record.params.n)
        }
        try:
            for job in jobs:
                self.engine.submit(job.record)
            left = len(owner)
            while left:
                left -= self._advance(jobs, owner, on_finish)
        except BaseException:
            self.engine.abort(list(owner))
            raise
        return [j.completion for j in jobs]

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages) or several, through the model's chat template."""
        if self.template is None:
            raise RequestError("the model has no chat template; use generate with a prompt of your own")
        one = bool(conversations) and isinstance(conversations[0], dict)
        many: Sequence[Any] = [conversations] if one else conversations
        prompts = [
            self.tokenizer.encode(self.template.render(list(c), tools=tools), add_special=False) for c in many
        ]
        return self.generate(prompts, params)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- one call of generate -------------------------------------------------------------------------------------------------------

    def _job(self, prompt: Prompt, params: SamplingParams) -> "_Job":
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=new_seed())
        record = SessionRecord(new_session_id(), ids, params)
        samples = [Sample(k, logprobs=None if params.logprobs is None else []) for k in range(params.n)]
        text = [
            StreamDetokenizer(
                self.tokenizer,
                stop=params.stop,
                include_stop=params.include_stop,
                min_tokens=params.min_tokens,
            )
            for _ in samples
        ]
        return _Job(record, Completion(ids, samples), text, len(samples))

    def _advance(
        self,
        jobs: "list[_Job]",
        owner: dict[str, tuple[int, int]],
        on_finish: Callable[[int, Completion], None] | None,
    ) -> int:
        """Run one step; returns how many samples ended with it."""
        ended = 0
        for event in self.engine.step():
            place = owner.get(event.session_id)
            if place is None:
                continue
            job = jobs[place[0]]
            if job.take(event, place[1]):
                if event.finish is None:
                    self.engine.abort([event.session_id])
                del owner[event.session_id]
                ended += 1
                job.running -= 1
                if job.running == 0 and on_finish is not None:
                    on_finish(place[0], job.completion)
        return ended


@dataclass(slots=True)
class _Job:
    """One prompt on its way. ``text`` holds a detokenizer per sample."""

    record: SessionRecord
    completion: Completion
    text: list[StreamDetokenizer]
    running: int

    def take(self, event: SessionEvent, k: int) -> bool:
        """Add an event to sample ``k``; True when the sample has ended (by the engine, or by a stop string found here)."""
        sample, text = self.completion.samples[k], self.text[k]
        if event.error is not None:
            raise _failure(event)
        if event.prompt_logprobs is not None:
            self.completion.prompt_logprobs = event.prompt_logprobs
        self.completion.cached_tokens = max(self.completion.cached_tokens, event.cached_tokens)
        sample.token_ids.extend(event.token_ids)
        if sample.logprobs is not None and event.logprobs:
            sample.logprobs.extend(event.logprobs)
        sample.text += text.push(event.token_ids)
        if text.stopped is not None:
            sample.finish_reason, sample.stop_reason = "stop", text.stopped
            return True
        if event.finish is None:
            return False
        sample.text += text.finish()
        sample.finish_reason, sample.stop_reason = event.finish, event.stop_id
        return True


def _failure(event: SessionEvent) -> KilatError:
    message = event.error or "the engine failed"
    if event.error_code == RequestError.code:
        return RequestError(message)
    return EngineError(message, code=event.error_code)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string, or a list of ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [p for p in prompts if isinstance(p, int)]
    many = [p for p in prompts if not isinstance(p, int)]
    if ids and many:
        raise RequestError(
            "token ids and prompts are mixed in one list; give one list of ids per prompt", param="prompts"
        )
    return [ids] if ids else many
