"""Any message that one process can send to another, for hypothesis. Numbers are finite, so that messages compare equal to themselves."""

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kilat.wire.kv import Endpoint, KvLayout, Offer
from kilat.wire.messages import (
    Abort,
    Adopt,
    Announce,
    Drain,
    Export,
    Fatal,
    Fetch,
    Fetched,
    FromWorker,
    Hello,
    Lend,
    Offered,
    PagesChanged,
    Peers,
    Ping,
    Recalled,
    Refused,
    Release,
    Resync,
    SessionEvent,
    Status,
    StepEvents,
    Submit,
    TokenLogprob,
    ToWorker,
)
from kilat.wire.sampling import Grammar, SamplingParams
from kilat.wire.session import SessionRecord

token_ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**63 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)
logprob_values = st.floats(max_value=0.0, allow_nan=False)  # -inf is the log-probability of what cannot come
texts = st.text(max_size=20)
ids = st.lists(token_ids, max_size=8)


def optional(strategy: SearchStrategy) -> SearchStrategy:
    return st.none() | strategy


def numbers() -> SearchStrategy[dict[str, float]]:
    return st.dictionaries(texts, reals, max_size=4)


grammars = st.builds(
    Grammar, kind=st.sampled_from(["json_schema", "json_object", "regex", "choice", "ebnf"]), text=texts
)
params = st.builds(
    SamplingParams,
    temperature=reals,
    top_k=counts,
    top_p=reals,
    min_p=reals,
    repetition_penalty=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    logit_bias=st.dictionaries(token_ids, reals, max_size=4),
    seed=optional(seeds),
    n=counts,
    max_tokens=optional(counts),
    min_tokens=counts,
    stop=st.lists(texts, max_size=3).map(tuple),
    include_stop=st.booleans(),
    stop_token_ids=ids.map(tuple),
    ignore_eos=st.booleans(),
    logprobs=optional(counts),
    prompt_logprobs=optional(counts),
    grammar=optional(grammars),
)
records = st.builds(
    SessionRecord,
    session_id=texts,
    prompt_ids=ids,
    params=params,
    output_ids=ids,
    branch=counts,
    epoch=counts,
    tenant=texts,
    salt=texts,
    priority=seeds,
    arrival_s=reals,
    page_hashes=st.lists(st.binary(min_size=16, max_size=16), max_size=4),
    version=counts,
)
logprobs = st.builds(
    TokenLogprob,
    token_id=token_ids,
    logprob=logprob_values,
    top=st.lists(st.tuples(token_ids, logprob_values), max_size=3),
)
events = st.builds(
    SessionEvent,
    session_id=texts,
    epoch=counts,
    seq=counts,
    token_ids=ids,
    finish=optional(st.sampled_from(["stop", "length", "abort", "error"])),
    stop_id=optional(token_ids),
    logprobs=optional(st.lists(logprobs, max_size=3)),
    prompt_logprobs=optional(st.lists(optional(logprobs), max_size=3)),
    cached_tokens=counts,
    error=optional(texts),
    error_code=optional(texts),
)
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4)
endpoints = st.lists(st.builds(Endpoint, transport=texts, address=st.binary(max_size=40)), max_size=2)
layouts = st.builds(
    KvLayout,
    layers=counts,
    page_tokens=counts,
    kv_heads=counts,
    head_dim=counts,
    dtype=texts,
    page_bytes=counts,
    model=texts,
)
offers = st.builds(
    Offer,
    move_id=texts,
    owner=texts,
    epoch=counts,
    pages=ids,
    first_token=counts,
    n_tokens=counts,
    deadline_s=reals,
    names=hashes,
    checksums=ids,
)
TO_WORKER: dict[type, SearchStrategy] = {
    Submit: st.builds(Submit, record=records, hand_over=st.booleans(), prefix=optional(offers)),
    Peers: st.builds(Peers, endpoints=st.dictionaries(texts, endpoints, max_size=3)),
    Fetch: st.builds(Fetch, session_id=texts, offer=offers),
    Adopt: st.builds(Adopt, record=records, offer=optional(offers)),
    Announce: st.builds(Announce, session_ids=st.lists(texts, max_size=4)),
    Export: st.builds(Export, session_ids=st.lists(texts, max_size=4)),
    Lend: st.builds(Lend, move_id=texts, names=hashes),
    Release: st.builds(Release, move_ids=st.lists(texts, max_size=4)),
    Resync: st.builds(Resync),
    Abort: st.builds(Abort, session_ids=st.lists(texts, max_size=4)),
    Drain: st.builds(Drain, deadline_s=reals),
    Ping: st.builds(Ping),
}
FROM_WORKER: dict[type, SearchStrategy] = {
    Hello: st.builds(
        Hello,
        worker_id=texts,
        model_id=texts,
        max_model_len=counts,
        max_num_seqs=counts,
        vocab_size=counts,
        page_tokens=counts,
        n_pages=counts,
        eos_ids=ids,
        kernels=texts,
        ledger_bytes=st.dictionaries(texts, counts, max_size=4),
        layout=optional(layouts),
        endpoints=endpoints,
        protocol=counts,
    ),
    Offered: st.builds(Offered, session_id=texts, offer=offers, record=optional(records)),
    Recalled: st.builds(Recalled, session_id=texts, pages=st.dictionaries(texts, counts), n_bytes=counts),
    Fetched: st.builds(Fetched, session_id=texts, move_id=texts, ok=st.booleans(), n_bytes=counts, why=texts),
    PagesChanged: st.builds(PagesChanged, seq=counts, stored=hashes, dropped=hashes, whole=st.booleans()),
    StepEvents: st.builds(StepEvents, step=counts, events=st.lists(events, max_size=4)),
    Status: st.builds(
        Status,
        step=counts,
        busy=st.booleans(),
        draining=st.booleans(),
        counters=numbers(),
        gauges=numbers(),
    ),
    Refused: st.builds(
        Refused,
        session_id=texts,
        message=texts,
        code=texts,
        status=counts,
        retryable=st.booleans(),
        param=optional(texts),
    ),
    Fatal: st.builds(Fatal, message=texts),
}

to_worker: SearchStrategy[ToWorker] = st.one_of(*TO_WORKER.values())
from_worker: SearchStrategy[FromWorker] = st.one_of(*FROM_WORKER.values())
