"""Grammars: every kind constrains, bad ones fail with a reason, big ones hit a limit, and a matcher can be rebuilt from tokens."""

import json
import time

import pytest
import torch

from kilat.base.errors import CapacityError, RequestError
from kilat.engine.grammar import COMPILE_LIMIT_S, GrammarCompiler
from kilat.wire.sampling import Grammar
from tests.engine.harness import EOS, byte_tokenizer_json, drain, make_engine, outputs, record, tiny_model

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def compiler():
    c = GrammarCompiler(byte_tokenizer_json(), EOS + 1, (EOS,))
    yield c
    c.close()


@pytest.fixture(scope="module")
def alphabet():
    """Id of every character of the byte tokenizer."""
    vocab = json.loads(byte_tokenizer_json())["model"]["vocab"]
    return {k.replace("Ġ", " "): v for k, v in vocab.items()}


def allowed(matcher) -> set[int]:
    logits = torch.zeros(EOS + 1)
    assert matcher.forbid(logits) is None
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


def walk(matcher, text, alphabet):
    for c in text:
        assert alphabet[c] in allowed(matcher), f"{c!r} of {text!r} is not allowed"
        assert matcher.advance([alphabet[c]]) is None


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("regex", "[0-9]{3}"), "123"),
        (Grammar("choice", '["yes", "no \\"x\\""]'), 'no "x"'),
        (Grammar("json_object"), '{"a":[1,2]}'),
        (
            Grammar(
                "json_schema", '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}'
            ),
            '{"n":42}',
        ),
        (Grammar("ebnf", 'start: "a" "b"+'), "abb"),
        (Grammar("ebnf", 'root ::= "x" [0-9]'), "x7"),
    ],
)
def test_every_kind_accepts_its_language_and_then_the_end(compiler, alphabet, grammar, text):
    matcher = compiler.compile(grammar).result(30)
    walk(matcher, text, alphabet)
    assert EOS in allowed(matcher)


def test_only_what_the_grammar_allows_stays_finite(compiler, alphabet):
    matcher = compiler.compile(Grammar("regex", "[ab]c")).result(30)
    assert allowed(matcher) == {alphabet["a"], alphabet["b"]}
    matcher.advance([alphabet["a"]])
    assert allowed(matcher) == {alphabet["c"]}
    matcher.advance([alphabet["c"]])
    assert matcher.finished


def test_a_token_outside_the_grammar_is_reported(compiler, alphabet):
    matcher = compiler.compile(Grammar("regex", "ab")).result(30)
    assert "left its grammar" in matcher.advance([alphabet["z"]])


def test_a_matcher_is_rebuilt_by_walking_over_the_output(compiler, alphabet):
    grammar = Grammar("json_schema", '{"type":"array","items":{"type":"integer"}}')
    whole, rebuilt = compiler.compile(grammar).result(30), compiler.ready(grammar)
    for c in "[1,2":
        whole.advance([alphabet[c]])
    rebuilt.advance([alphabet[c] for c in "[1,2"])
    assert allowed(whole) == allowed(rebuilt)


def test_two_sessions_of_one_grammar_do_not_share_a_position(compiler, alphabet):
    one, two = (compiler.compile(Grammar("regex", "ab")).result(30) for _ in range(2))
    one.advance([alphabet["a"]])
    assert allowed(two) == {alphabet["a"]}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a(b"),
        Grammar("regex", "(" * 800),
        Grammar("choice", "[]"),
        Grammar("choice", '{"a": 1}'),
        Grammar("choice", "not json"),
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"type": "no such type"}'),
        Grammar("json_schema", '{"$ref": "http://localhost/schema.json"}'),
        Grammar("json_schema", '{"a":' * 5000 + "1" + "}" * 5000),
        Grammar("ebnf", "start: nothing_defined"),
        Grammar("ebnf", "root ::= ("),
    ],
)
def test_bad_and_oversized_grammars_are_the_requests_fault(compiler, grammar):
    begin = time.monotonic()
    with pytest.raises(RequestError) as e:
        compiler.compile(grammar).result(30)
    assert e.value.param == "grammar"
    assert len(e.value.message) < 500
    assert time.monotonic() - begin < COMPILE_LIMIT_S


def test_a_bad_grammar_ends_its_session_and_no_other():
    engine = make_engine(tiny_model(), grammar=True)
    engine.submit(record("bad", [1, 2], grammar=Grammar("regex", "a(b")))
    engine.submit(record("good", [1, 2], ignore_eos=True))
    events = []
    while engine.has_work:
        events += engine.step()
    last = {e.session_id: e for e in events if e.finish}
    assert last["bad"].finish == "error"
    assert last["bad"].error_code == RequestError.code
    assert last["good"].finish == "length"
    engine.close()


def test_abort_while_the_grammar_compiles_ends_the_session_once():
    engine = make_engine(tiny_model(), grammar=True)
    engine.submit(record("s", [1, 2], grammar=Grammar("regex", "[a-z]{5}")))
    events = engine.abort(["s"])
    while engine.has_work:
        events += engine.step()
    assert [(e.session_id, e.finish) for e in events] == [("s", "abort")]
    engine.close()


def test_every_sample_of_a_request_that_never_ran_is_ended():
    engine = make_engine(tiny_model(), grammar=True)
    engine.submit(record("bad", [1, 2], grammar=Grammar("regex", "a(b"), n=3))
    ends = [(e.session_id, e.seq, e.finish) for e in drain(engine)]
    assert ends == [("bad", 0, "error"), ("bad#1", 0, "error"), ("bad#2", 0, "error")]
    engine.submit(record("left", [1, 2], grammar=Grammar("regex", "[a-z]{5}"), n=2))
    assert [(e.session_id, e.finish) for e in engine.abort(["left"])] == [
        ("left", "abort"),
        ("left#1", "abort"),
    ]
    assert drain(engine) == []
    engine.close()


def test_without_a_tokenizer_a_grammar_is_refused_at_once():
    engine = make_engine(tiny_model())
    with pytest.raises(RequestError, match="tokenizer"):
        engine.submit(record("s", [1], grammar=Grammar("json_object")))


def test_sessions_that_wait_for_their_grammar_have_one_id_each_and_count_against_the_queue():
    engine = make_engine(tiny_model(), grammar=True, max_waiting=2)
    grammar = Grammar("regex", "[a-z]{5}")
    engine.submit(record("a", [1, 2], grammar=grammar))
    with pytest.raises(RequestError, match="id is live"):
        engine.submit(record("a", [3], grammar=grammar))
    engine.submit(record("b", [1, 2], grammar=grammar))
    with pytest.raises(CapacityError, match="limit 2"):
        engine.submit(record("c", [1, 2], grammar=grammar))
    assert set(outputs(drain(engine))) == {"a", "b"}
    engine.close()
