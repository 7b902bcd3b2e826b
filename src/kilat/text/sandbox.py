"""A Jinja environment for templates that nobody has vouched for: no reach outside, bounded work, bounded memory.

Jinja's immutable sandbox keeps a template from Python's internals and from changing its inputs. This adds fuel: all work that grows
with the data (rounds of loops, calls, filters, comparisons, building text, output) is paid for before it is done, from the budget
of one rendering. Straight-line code is bounded by the template's length. What has no price (``str.format``, padding, methods of
numbers) is refused.

Otherwise a template finds what transformers gives it: trim_blocks, lstrip_blocks, loop controls, ``tojson`` without HTML escapes,
``raise_exception``, ``strftime_now``, ``{% generation %}``.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from kilat.text import filters
from kilat.text.fuel import Fuel, fuel_of

MAX_RANGE: Final = 100_000
MAX_INT_BITS: Final = 64
MAX_DATE_CHARS: Final = 256

_STR_METHODS = (
    "split rsplit splitlines strip lstrip rstrip startswith endswith upper lower title capitalize casefold swapcase find rfind index "
    "rindex count isdigit isalpha isalnum isspace isupper islower isnumeric isdecimal partition rpartition removeprefix removesuffix "
    "replace join"
)
_METHODS: Final[MappingProxyType[type, list[str]]] = MappingProxyType(
    {
        str: _STR_METHODS.split(),
        list: ["index", "count", "copy"],
        tuple: ["index", "count"],
        dict: ["get", "items", "keys", "values", "copy"],
    }
)


class _Price(NodeTransformer):
    """Writes payments into the syntax tree, as calls of the markers of :class:`Sandbox`."""

    def __init__(self, environment: "Sandbox") -> None:
        self.environment = environment

    def call(self, marker: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
        made = nodes.Call(nodes.EnvironmentAttribute(marker), arguments, [], None, None)
        made.set_lineno(lineno).set_environment(self.environment)
        return made

    def body(self, node: Any) -> nodes.Node:
        """Each run of a body costs by its size, for all in it that is not paid for one by one."""
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        size = sum(1 for _ in node.find_all(nodes.Expr))
        self.generic_visit(node)
        pay = self.call("pay_spend", [nodes.Const(1 + size // 16 + text // 64)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(pay, lineno=node.lineno))
        assert isinstance(node, nodes.Node)
        return node

    visit_Macro = visit_CallBlock = visit_Block = body

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.body(node)
        if node.test is not None:
            pay = self.call("pay_spend", [nodes.Const(1)], node.lineno)
            node.test = nodes.And(pay, node.test, lineno=node.lineno, environment=self.environment)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self.call("pay_concat", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self.call("pay_operand", [node.expr], node.lineno)
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self.call("pay_operand", [node.expr], node.lineno)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        # a key is hashed, which walks through a tuple
        node.key = self.call("pay_operand", [node.key], node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self.call("pay_operand", [node], node.lineno)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self.call("pay_operand", [node.arg], node.lineno)
        return node


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it is its body and no more."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(Namespace):
    """``namespace()``, whose attributes cannot pass for Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; ``now`` tells the time to templates that print the date. Not changed once made, safe to share.

    A rendering's variables must come from :func:`kilat.text.fuel.variables`.
    """

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    # what _Price lets a template call; call() knows them by identity
    pay_spend, pay_concat, pay_operand = object(), object(), object()

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # folding constants would do a template's work, unpaid, while it is compiled
            optimized=False,
            extensions=[loopcontrols, _Generation],
            finalize=_finalize,
        )

        def strftime_now(pattern: str) -> str:
            return now().strftime(pattern[:MAX_DATE_CHARS])

        self.filters = filters.all_filters()
        self.tests = filters.all_tests()
        self.globals = {
            "range": _range,
            "dict": dict,
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise,
            "strftime_now": strftime_now,
        }
        self._functions = tuple(self.globals.values())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        priced = _Price(self).visit(super()._parse(source, name, filename))
        assert isinstance(priced, nodes.Template)
        return priced

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here."""
        fuel = fuel_of(__context)
        if __obj is Sandbox.pay_spend:
            fuel.spend(args[0])
            return True
        if __obj is Sandbox.pay_operand:
            if isinstance(args[0], Iterator):
                raise TemplateError("a generator cannot be used here: make it a list first, with |list")
            fuel.weigh(args[0])
            return args[0]
        if __obj is Sandbox.pay_concat:
            return filters.join(fuel, "", args)
        fuel.spend(1)
        if type(__obj) is BuiltinMethodType:
            own = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
            return _call_method(fuel, __obj, args, own)
        if not __self._may_call(__obj):
            name = getattr(__obj, "__name__", type(__obj).__name__)
            raise SecurityError(f"the chat template calls {name!s:.50}, which is not allowed")
        # a macro costs about this many steps of a loop
        fuel.spend(8)
        for value in args:
            fuel.touch(value) if isinstance(__obj, Macro) else fuel.weigh(value)
        return super().call(__context, __obj, *args, **kwargs)

    def _may_call(self, what: Any) -> bool:
        owner = what.__self__ if isinstance(what, MethodType) else None
        return (
            isinstance(what, Macro | LoopContext | BlockReference | Undefined | Joiner)
            or isinstance(owner, LoopContext | Cycler)
            or any(what is function for function in self._functions)
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, paid by the size of the result; whole numbers stay within 64 bits."""
        fuel = fuel_of(context)
        fuel.spend(1)
        if operator == "%" and isinstance(left, str):
            return filters.percent(fuel, left, right)
        # a huge left side alone costs time in proportion to its length only
        _check_int(right)
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            fuel.spend((len(left) + len(right)) >> (6 if isinstance(left, str) else 4))
        elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            fuel.spend(max(right, 0) * len(left) >> (6 if isinstance(left, str) else 4))
        elif operator == "*" and isinstance(right, str | list | tuple) and isinstance(left, int):
            fuel.spend(max(left, 0) * len(right) >> (6 if isinstance(right, str) else 4))
        elif operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 64):
            raise TemplateError(f"{left} ** {right} is out of range for a chat template")
        result = super().call_binop(context, operator, left, right)
        _check_int(result)
        return result


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return fuel_of(context).text(value)


def _call_method(fuel: Fuel, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a string, list, tuple or dict."""
    owner, name = method.__self__, method.__name__
    if name not in _METHODS.get(type(owner), ()):
        raise SecurityError(f"the chat template calls {type(owner).__name__}.{name}, which is not allowed")
    if isinstance(owner, str) and name == "join":
        return filters.join(fuel, owner, *args, **kwargs)
    if isinstance(owner, str) and name == "replace":
        return filters.replace(fuel, owner, *args, **kwargs)
    price = fuel.weigh([*args, *kwargs.values()])
    if name in ("index", "count") and not isinstance(owner, str):
        fuel.spend(len(owner) * price)
    elif isinstance(owner, str) or name == "copy":
        fuel.touch(owner)
    result = method(*args, **kwargs)
    if isinstance(result, list):
        fuel.touch(result)
    return result


def _check_int(value: object) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateError(f"a whole number has {value.bit_length()} bits, limit {MAX_INT_BITS}")


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}: it begins with an underscore")


def _range(*args: int) -> range:
    made = range(*args)
    if len(made) > MAX_RANGE:
        raise TemplateError(f"range has {len(made)} numbers, limit {MAX_RANGE}")
    return made


def _raise(message: object) -> None:
    raise TemplateError(str(message))
