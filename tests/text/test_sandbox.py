"""Hostile templates end in an error after bounded work; ordinary ones get what Jinja gives."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from itertools import islice

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kilat.base.errors import LimitError
from kilat.text.fuel import UNITS, Fuel, variables
from kilat.text.sandbox import Sandbox

pytestmark = pytest.mark.logic
NOW = datetime(2024, 2, 3, 4, 5, 6)
SANDBOX = Sandbox(lambda: NOW)
MESSAGES = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes"}]
REFUSALS = (TemplateError, LimitError, TypeError, ValueError, RecursionError, OverflowError, AttributeError)


def render(source: str, fuel: Fuel | None = None, **values: object) -> str:
    template = SANDBOX.from_string(source)
    given = variables({"messages": MESSAGES, **values}, fuel or Fuel())
    parts: Iterator[str] = template.generate(given)
    return "".join(islice(parts, 1_000_000))


def double(step: str, start: str = "'ab'", times: int = 64) -> str:
    """A template that lets ``x`` grow by the same step again and again."""
    return f"{{% set x = {start} %}}" + f"{{% set x = {step} %}}" * times


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] | trim }}|{{ messages[0].role }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ m.role.upper() }} {% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.length }}{% else %}none{% endfor %}",
        "{% for a in [1, 2] recursive %}{{ a }}{% if a == 1 %}{{ loop([5]) }}{% endif %}{% endfor %}",
        "{% for m in messages[::-1] %}{{ m.content[1:] }}{% endfor %}",
        "{% set ns = namespace(n=0, l=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.l }}",
        "{% macro f(x, y=2) %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}{% call f(3) %}c{% endcall %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | join(', ') }}",
        "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | first }}{{ [1, 2] | select('odd') | list }}",
        "{{ [3, 1, 2] | sort | join('-') }}{{ [1, 1, 2] | unique | list }}{{ [1, 2] | sum }}{{ [4, 5] | max }}{{ {'b': 1, 'a': 2} | dictsort }}",
        "{{ 'a' ~ 1 ~ none ~ true }}{{ 'a' + 'b' }}{{ 'ab' * 3 }}{{ [0] * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 3 - 5 }}{{ 1 / 4 }}",
        "{{ '%s is %d and %.2f' % ('x', 3, 0.5) }}{{ '100%' }}{{ '%5s' % 'a' }}",
        "{{ 'a b c'.split(' ') }}{{ 'xax'.strip('x') }}{{ 'a-b'.replace('-', '+') }}{{ 'a-b-c'.replace('-', '', 1) }}{{ ','.join(['a', 'b']) }}",
        "{{ 'abc'.startswith('ab') }}{{ 'abc'.find('c') }}{{ 'Ab'.lower() }}{{ 'a\nb'.splitlines() }}{{ 'abab'.count('ab') }}{{ [1, 2].index(2) }}",
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 5) }}{{ {'a': 1} | items | list }}",
        "{{ 'x' is string }}{{ 1 is number }}{{ {} is mapping }}{{ [] is iterable }}{{ y is defined }}{{ none is none }}{{ 3 is odd }}{{ 2 is in [2] }}",
        "{{ y | default('d') }}{{ '' | default('e', true) }}{{ ['a'] | last }}{{ 'ab' | reverse }}{{ '7' | int + 1 }}{{ 1.5 | string }}{{ 'ab' | capitalize }}",
        "{{ 'a' if messages else 'b' }}{{ messages[0].content is string and 'H' in messages[0].content }}{{ 1 < 2 < 3 }}{{ not true }}{{ 'z' not in 'abc' }}",
        "{{ 'a\nb' | indent }}{{ 'a\nb' | indent(2, true) }}{{ 'a<b' | safe }}{{ 'a b' | title }}{{ 'abc' | replace('b', 'x') }}{{ 'ab' | list }}{{ -3 | abs }}",
        "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{% filter upper %}q{{ x }}{% endfilter %}{% with z = 3 %}{{ z }}{% endwith %}",
        "{% for i in range(3) %}{{ i }}{% endfor %}{{ range(1, 9, 2) | list }}{{ dict(a=1) }}{% set c = cycler('o', 'e') %}{{ c.next() }}{{ c.next() }}",
        "{% set j = joiner(', ') %}{% for i in 'abc' %}{{ j() }}{{ i }}{% endfor %}{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{{ loop.cycle('x', 'y') }}{% endfor %}",
        "  {% if true %}\n  x\n  {% endif %}\n{#- c -#}  y {%- if true %} z{% endif -%}  w",
        "{% block a %}in {{ messages | length }}{% endblock %}{{ self.a() }}",
        "{{ messages[0]['co' ~ 'ntent'] }}{{ messages[-1].role }}{{ (1, 2)[1] }}{{ {'a': {'b': 3}}.a.b }}{{ missing }}{{ messages[0].missing }}",
    ],
)
def test_ordinary_template_gives_what_jinja_gives(source):
    twin = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    assert render(source) == twin.from_string(source).render(messages=MESSAGES)


def test_helpers_of_chat_templates():
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2024"
    assert render("a{% generation %}b{% set y = 1 %}{% endgeneration %}c{{ y }}") == "abc"
    assert (
        render(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        )
        == "023"
    )
    with pytest.raises(TemplateError, match="no such role: x"):
        render("{{ raise_exception('no such role: ' ~ 'x') }}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>', 'b': [1, none, true]} | tojson }}", '{"a": "<é>", "b": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ],
)
def test_tojson_writes_plain_json(source, expected):
    assert render(source) == expected


HOSTILE = {
    "loop in loop": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "filtered loop in loop": "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "loop in a macro": "{% macro f() %}{% for b in range(100000) %}{% endfor %}{% endmacro %}{% for a in range(100000) %}{{ f() }}{% endfor %}",
    "loop in a call block": "{% macro f() %}{{ caller() }}{% endmacro %}{% for a in range(100000) %}{% call f() %}{% for b in range(100000) %}{% endfor %}{% endcall %}{% endfor %}",
    "macro calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "macro calls itself for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block shows itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "recursive loop over a list of itself": "{% for x in range(50) recursive %}{{ loop(range(50)) if loop.depth < 9 }}{% endfor %}",
    "string times": "{{ ('a' * 1000000000) | length }}",
    "times string": "{{ (1000000000 * 'a') | length }}",
    "list times": "{{ ([0] * 1000000000) | length }}",
    "power": "{{ 9 ** 999999999 }}",
    "power of power": double("x ** 60", "7"),
    "numbers doubling": double("x * x", "3", 100),
    "numbers adding up": double("x + x", "1", 100),
    "huge number": "{{ (('f' * 1000000) | int(base=16)) // 7 }}",
    "text doubling": double("x ~ x"),
    "text adding": double("x + x"),
    "text joining": double("x.join([x, x, x])"),
    "join filter": double("[x, x, x] | join(x)"),
    "replace method": double("x.replace('a', 'aaaa')"),
    "replace filter": double("x | replace('a', 'aaaa')"),
    "replace nothing": double("x.replace('', x)"),
    "percent": double("'%s%s%s' % (x, x, x)"),
    "percent by name": "{{ '%(a)s' % {'a': 1} }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.0 }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format map": "{{ '{a}'.format_map({'a': 1}) }}",
    "set block doubling": "{% set x %}ab{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 64,
    "filter block": "{% for i in range(100000) %}{% filter indent(60) %}"
    + "a\n" * 1000
    + "{% endfilter %}{% endfor %}",
    "macro text": "{% macro f() %}"
    + "a" * 100_000
    + "{% endmacro %}{% set x %}{% for i in range(100000) %}{{ f() }}{% endfor %}{% endset %}",
    "text in a loop": "{% set x %}{% for i in range(100000) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
    "big literal in a loop": "{% for i in range(100000) %}{% set x = [" + "1," * 5_000 + "] %}{% endfor %}",
    "list adding": double("x + x", "[1]"),
    "list of lists printed": double("[x, x]", "[]") + "{{ x }}",
    "list of lists as string": double("[x, x]", "[]") + "{{ (x | string) | length }}",
    "list of lists in text": double("[x, x]", "[]") + "{{ ('' ~ x) | length }}",
    "list of lists in percent": double("[x, x]", "[]") + "{{ ('%s' % [x]) | length }}",
    "list of lists as JSON": double("[x, x]", "[]") + "{{ x | tojson }}",
    "list of lists compared": "{% set y = [] %}{% set x = [] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 64
    + "{{ x == y }}",
    "list of lists tested": "{% set y = [] %}{% set x = [] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 64
    + "{{ x is eq y }}",
    "list of lists searched": "{% set y = [] %}{% set x = [] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 64
    + "{{ [x].index(y) }}",
    "list of lists in list": double("[x, x]", "[]") + "{{ x in [[]] }}",
    "list of lists sorted": double("[x, x]", "[]") + "{{ [x, x] | sort }}",
    "list of lists raised": double("[x, x]", "[]") + "{{ raise_exception(x) }}",
    "list of lists changed": double("[x, x]", "[]")
    + "{% for i in [1, 2] %}{{ loop.changed(x) }}{% endfor %}",
    "tuple of tuples as key": double("(x, x)", "(1,)") + "{{ {x: 1} | length }}",
    "tuple of tuples as index": double("(x, x)", "(1,)") + "{{ {}[x] }}",
    "tuple of tuples got": double("(x, x)", "(1,)") + "{{ {}.get(x) }}",
    "tuple of tuples in dict": double("(x, x)", "(1,)") + "{{ dict([[x, 1]]) | length }}",
    "tuple of tuples unique": double("(x, x)", "(1,)") + "{{ [x] | unique | list | length }}",
    "JSON indented": double("[x, x]", "[]", 12) + "{{ x | tojson(indent=1000000) }}",
    "text indented": "{{ 'a' | indent(1000000000, true) }}",
    "text indented by text": "{{ 'a\nb' | indent('x' * 1000) }}",
    "range": "{{ range(1000000000) | list }}",
    "range of ranges": "{{ range(10000000000000000000000000) }}",
    "generator searched": "{{ [] in range(100000) | map('list') }}",
    "slices in a loop": "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% set y = x[1:] %}{% endfor %}",
    "searches in a loop": "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% set y = 'b' in x %}{% endfor %}",
    "upper in a loop": "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% set y = x | upper %}{% endfor %}",
    "method in a loop": "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% set y = x.lower() %}{% endfor %}",
    "trim in a map": "{{ range(100000) | map('string') | map('replace', '', 'a' * 100000) | list | length }}",
    "list in a namespace": "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [i] %}{% endfor %}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "namespace compared to itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ [ns] == [ns] }}",
    "padding": "{{ 'a'.ljust(1000000000) }}",
    "zeros": "{{ 'a'.zfill(1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "text of a pattern": "{{ strftime_now('%c' * 100000) * 1000000 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(name):
    with pytest.raises((LimitError, TemplateError, RecursionError, OverflowError)):
        render(HOSTILE[name], Fuel(50_000))


# the second step of each would take terabytes at once
GIANT_STEPS = {
    "replace": "{% set x = 'a' * 6000000 %}{{ x.replace('', x) | length }}",
    "replace filter": "{% set x = 'a' * 6000000 %}{{ x | replace('', x) | length }}",
    "join": "{% set x = 'a' * 6000000 %}{{ x.join(['a'] * 200000) | length }}",
    "join filter": "{% set x = 'a' * 6000000 %}{{ (['a'] * 200000) | join(x) | length }}",
    "times": "{% set x = 'a' * 6000000 %}{{ (x * 6000000) | length }}",
    "divide": "{% set h = ('f' * 1000000) | int(base=16) %}{{ h // h }}",
    "remainder": "{% set h = ('f' * 1000000) | int(base=16) %}{{ 7 % h }}",
}


@pytest.mark.parametrize("name", GIANT_STEPS)
def test_giant_step_is_paid_before_it_is_taken(name):
    with pytest.raises((LimitError, TemplateError)):
        render(GIANT_STEPS[name])


def test_items_that_a_loop_leaves_out_are_paid():
    def price(n: int) -> int:
        fuel = Fuel()
        render("{% for i in range(n) if false %}{% endfor %}", fuel, n=n)
        return UNITS - fuel.left

    assert price(2000) - price(1000) == 1000


def test_generator_is_not_searched_unpaid():
    with pytest.raises(TemplateError, match="make it a list first"):
        render("{{ 'a' in 'abc' | map('upper') }}")
    assert render("{{ 'A' in 'abc' | map('upper') | list }}") == "True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0] }}",
        "{{ namespace.__init__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'__class__': 1}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages.sort() }}",
        "{{ messages.clear() }}",
        "{{ messages[0].pop('role') }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({}) }}",
        "{{ 'a'.format() }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ lipsum() }}",
        "{{ self.__init__ }}",
        "{{ messages() }}",
        "{{ 'x'() }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ '' | attr('__class__') }}",
        "{{ [1] | random }}",
        "{{ 'x' | pprint }}",
        "{{ 'x' | center(10) }}",
        "{{ [1] | batch(10000000, 0) | list }}",
        "{{ 'x' | urlize }}",
        "{% autoescape true %}{{ ('a' | safe).__html__() }}{% endautoescape %}",
        "{% debug %}",
        "{{ 'x' is filter }}",
    ],
)
def test_template_reaches_nothing_outside(source):
    shown = ""
    with suppress(*REFUSALS):
        shown = render(source)
    # what is hidden may be missing instead of an error, and then shows as nothing
    assert shown in ("", "[]")
    assert [m["role"] for m in MESSAGES] == ["user", "assistant"]


@pytest.mark.parametrize(
    "made", ["namespace(__class__=1)", "namespace({'_x': 1})", "namespace({'a': 1}, _x=2)"]
)
def test_namespace_has_no_hidden_attributes(made):
    with pytest.raises(SecurityError, match="begins with an underscore"):
        render("{% set ns = " + made + " %}")
    assert render("{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}") == "12"


def test_work_of_constants_is_left_to_the_rendering_that_pays_for_it():
    SANDBOX.from_string("{{ 'a' * 10000000000 }}")
    with pytest.raises(LimitError):
        render("{{ 'a' * 10000000000 }}")


def test_ordinary_conversation_takes_little_of_the_fuel():
    source = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    fuel = Fuel()
    render(source, fuel, messages=[{"role": "user", "content": "word " * 200}] * 500)
    assert UNITS - fuel.left < UNITS // 10


def test_price_grows_with_the_work():
    def price(n: int) -> int:
        fuel = Fuel()
        render("{% for i in range(n) %}{{ x }}{% endfor %}", fuel, n=n, x="a" * 6400)
        return UNITS - fuel.left

    assert price(10) < price(20) < price(40)
    assert 1.8 < (price(400) - price(200)) / (price(200) - price(100)) < 2.2


def test_walk_through_shared_parts_counts_each_time():
    fuel, value = Fuel(), [1]
    for _ in range(10):
        value = [value, value]
    assert fuel.weigh(value) > 1024
    with pytest.raises(LimitError, match="too much work"):
        for _ in range(20):
            value = [value, value]
        fuel.weigh(value)


def test_text_is_paid_by_its_length():
    fuel = Fuel()
    assert fuel.text("a" * 6400) == "a" * 6400
    assert UNITS - fuel.left == 101
    assert fuel.text([1, "b"]) == "[1, 'b']"


def test_used_up_fuel_is_an_error_of_the_request():
    fuel = Fuel()
    with pytest.raises(LimitError) as caught:
        fuel.spend(UNITS + 1)
    assert (caught.value.status, caught.value.param) == (400, "messages")
