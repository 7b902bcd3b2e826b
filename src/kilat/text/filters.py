"""Filters and tests of chat templates: Jinja's own, paid for, and those whose result can be larger than their input, done anew."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.runtime import Context
from jinja2.utils import pass_context

from kilat.text.fuel import Fuel, fuel_of

MAX_INDENT: Final = 64

# one pass over the value's own characters or items
_SHALLOW: Final = (
    "abs capitalize count d default dictsort first float int items last length list lower map reject rejectattr reverse select "
    "selectattr title trim upper"
)
# these look into the items as well
_DEEP: Final = "max min sort string sum unique"
# tests that compare look into both sides
_COMPARING: Final = "== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in"
# these would tell a template about Jinja itself
_NO_TESTS: Final = ("filter", "test")


def all_filters() -> dict[str, Any]:
    """Every filter a template may use, by name."""
    known: Mapping[str, Any] = DEFAULT_FILTERS
    metered = {name: _metered(known[name], deep=False) for name in _SHALLOW.split()}
    metered |= {name: _metered(known[name], deep=True) for name in _DEEP.split()}
    return metered | {"join": _join, "replace": _replace, "indent": _indent, "tojson": _tojson, "safe": _safe}


def all_tests() -> dict[str, Any]:
    """Every test (``x is ...``) a template may use, by name."""
    known: Mapping[str, Any] = {k: v for k, v in DEFAULT_TESTS.items() if k not in _NO_TESTS}
    return {**known, **{name: _metered(known[name], deep=True) for name in _COMPARING.split()}}


def join(fuel: Fuel, separator: str, values: Iterable[Any]) -> str:
    """``separator.join(values)``, paid; values that are not strings are printed."""
    parts = [fuel.text(value) for value in values]
    fuel.spend((sum(map(len, parts)) + len(separator) * len(parts)) >> 6)
    return separator.join(parts)


def replace(fuel: Fuel, text: str, old: str, new: str, count: int = -1) -> str:
    """``text.replace(old, new, count)``, paid."""
    fuel.touch(text)
    found = text.count(old) if count < 0 else min(text.count(old), count)
    fuel.spend(found // 8 + (max(len(new) - len(old), 0) * found >> 6))
    return text.replace(old, new, count)


def percent(fuel: Fuel, pattern: str, values: Any) -> str:
    """``pattern % values``, paid. Each value is used once and no field is wide, so the result is about as long as its parts."""
    if re.search(r"%(\(|[^a-zA-Z%]*(\*|\d{3}))", pattern):
        raise TemplateError("the chat template uses % with names, * or wide fields, which is not allowed")
    fuel.touch(pattern)
    fuel.spend(3 * fuel.weigh(values))
    return pattern % values


def _metered(function: Callable[..., Any], *, deep: bool) -> Callable[..., Any]:
    """A filter or test of Jinja that pays for its arguments and its result."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        fuel = fuel_of(context)
        if not isinstance(value, Iterable) or hasattr(value, "__len__"):
            (fuel.weigh if deep else fuel.touch)(value)
        elif deep:
            value = list(value)
            fuel.weigh(value)
        fuel.weigh([*args, *kwargs.values()])
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(*([first[wants]] if wants else []), value, *args, **kwargs)
        if hasattr(result, "__len__"):
            fuel.touch(result)
        return result

    return metered


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "") -> str:
    return join(fuel_of(context), d, value)


@pass_context
def _replace(context: Context, s: Any, old: str, new: str, count: int | None = None) -> str:
    fuel = fuel_of(context)
    return replace(fuel, fuel.text(s), old, new, -1 if count is None else count)


@pass_context
def _safe(context: Context, value: Any) -> str:
    return fuel_of(context).text(value)


@pass_context
def _indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = len(width) if isinstance(width, str) else width
    if size > MAX_INDENT:
        raise TemplateError(f"indent is {size} characters, limit {MAX_INDENT}")
    fuel = fuel_of(context)
    text = fuel.text(s)
    fuel.spend(1 + (len(text) + size * (text.count("\n") + 1) >> 6))
    indented: str = DEFAULT_FILTERS["indent"](text, width, first, blank)
    return indented


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: plain JSON, without Jinja's escapes for HTML."""
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise TemplateError(f"the indent of tojson is {indent}, allowed 0 to {MAX_INDENT}")
    fuel = fuel_of(context)
    price = fuel.weigh([value, separators])
    fuel.spend(price * (1 + (indent or 0) // 4))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
