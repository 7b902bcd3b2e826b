"""A whole engine around a tiny random model: real scheduler, runner, sampler and pages; only the weights are small."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kilat.base import metrics
from kilat.engine.core import Engine, EngineInfo
from kilat.engine.device_runner import DeviceLimits, DeviceRunner
from kilat.engine.grammar import GrammarCompiler
from kilat.engine.kv_memory import PageMemory, page_layout
from kilat.engine.runner import HostRunner
from kilat.engine.sampler import Sampler
from kilat.engine.work import model_work
from kilat.ops import kernels as reference_kernels
from kilat.ops.kernels import Kernels
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.messages import SessionEvent
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord
from tests.models import tiny

EOS = 256


def byte_tokenizer_json() -> str:
    """A tokenizer whose ids 0-255 are bytes (in the alphabet's order) and 256 is the end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<eos>"])
    return t.to_str()


def tiny_model(
    name: str = "llama", kernels: Kernels | None = None, device=tiny.CPU, dtype=torch.float32, **shape
):
    """A random model of architecture ``name`` over the byte tokenizer's vocabulary."""
    twin = tiny.transformers_model(name, vocab_size=EOS + 1, **shape)
    return tiny.kilat_model(twin, kernels or reference_kernels.reference(), dtype, device)


def make_engine(
    model,
    *,
    n_pages=64,
    page_tokens=8,
    step_tokens=64,
    seqs=8,
    depth=1,
    cache=True,
    grammar=False,
    runner="host",
    max_waiting=10_000,
    shared=False,
) -> Engine:
    """An engine over ``model`` with a pool of ``n_pages``; ``runner`` "device" is the CUDA runner, here on the CPU."""
    a = model.config.attention[0]
    layout = page_layout(len(model.layers), page_tokens, a.n_kv, a.head_dim, model.embedding.dtype, "tiny")
    max_len = min(model.config.max_positions, n_pages * page_tokens)
    config = SchedulerConfig(
        n_pages=n_pages,
        page_tokens=page_tokens,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_step_tokens=step_tokens,
        max_waiting=max_waiting,
        prefix_cache=cache,
        depth=depth,
    )
    scheduler = Scheduler(config, model_id="tiny", eos_ids=(EOS,))
    grammars = GrammarCompiler(byte_tokenizer_json(), model.config.vocab_size, (EOS,)) if grammar else None
    sampler = Sampler(model.kernels, (EOS,))
    device = model.embedding.device
    pages = PageMemory(layout, n_pages, device, shared=shared)
    pool = pages.kv
    matcher_of = grammars.ready if grammars else None
    if runner == "device":
        limits = DeviceLimits(page_tokens, seqs, step_tokens, max_len, scratch_page=n_pages)
        runs = DeviceRunner(model, pool, limits, sampler, matcher_of)
    else:
        runs = HostRunner(model, pool, page_tokens, sampler, matcher_of, depth)
    info = EngineInfo(
        "tiny",
        max_len,
        seqs,
        model.config.vocab_size,
        page_tokens,
        n_pages,
        (EOS,),
        "float32",
        "reference",
        {},
        model_work(model, layout),
    )
    return Engine(info, scheduler, runs, pages, grammars, depth=depth)


def record(session_id: str, prompt: list[int], **params) -> SessionRecord:
    """A session with a seed and, by default, 12 greedy tokens."""
    base = {"temperature": 0.0, "max_tokens": 12, "seed": 5}
    return SessionRecord(session_id, prompt, SamplingParams(**{**base, **params}))


def drain(engine: Engine, limit: int = 5000) -> list[SessionEvent]:
    """Run until nothing is left; all events."""
    events: list[SessionEvent] = []
    for _ in range(limit):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError(f"still working after {limit} steps")


def outputs(events: list[SessionEvent]) -> dict[str, list[int]]:
    """Session id -> all its tokens; checks that sequence numbers have no gap and nothing follows the end."""
    out: dict[str, list[int]] = {}
    seen: dict[str, int] = {}
    ended: set[str] = set()
    for e in events:
        assert e.session_id not in ended, f"{e.session_id} has news after its end"
        if e.session_id in seen:
            assert e.seq == seen[e.session_id] + 1, (
                f"{e.session_id}: event {e.seq} after {seen[e.session_id]}"
            )
        seen[e.session_id] = e.seq
        out.setdefault(e.session_id, []).extend(e.token_ids)
        if e.finish is not None:
            ended.add(e.session_id)
    assert ended == set(out), f"never ended: {set(out) - ended}"
    return out


def run(engine: Engine, records: list[SessionRecord]) -> dict[str, list[int]]:
    """Submit all, run to the end, check that no page is left in use."""
    for r in records:
        engine.submit(r)
    result = outputs(drain(engine))
    engine.scheduler.check()
    assert engine.gauges()[metrics.PAGES_USED] == 0
    return result
