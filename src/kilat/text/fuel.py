"""What a rendering may spend. One unit is about a microsecond of work, or 64 characters of text built."""

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Final

from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.utils import Namespace

from kilat.base.errors import LimitError

UNITS: Final = 1_000_000

# where a rendering's Fuel lies among the template's variables; no template can write this name
_KEY: Final = "fuel of this rendering"
_COLLECTIONS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


class Fuel:
    """The budget of one rendering, owned by it. Every method raises LimitError when the budget is used up."""

    def __init__(self, units: int = UNITS) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Pay for work that is about to be done."""
        self.left -= units
        if self.left < 0:
            raise LimitError(
                "the chat template needs too much work for these messages: send fewer or shorter messages",
                param="messages",
            )

    def touch(self, value: object) -> None:
        """Pay for one pass over the characters of a string, or over the items of a collection but not what is in them."""
        if isinstance(value, str):
            self.spend(1 + (len(value) >> 6))
        else:
            self.spend(1 + (len(value) if hasattr(value, "__len__") else 0))

    def weigh(self, value: object) -> int:
        """Pay for a walk through all that is in ``value``; returns the price. What is shared counts each time, so a small template
        cannot build a large walk."""
        before, pending = self.left, [value]
        while pending:
            item = pending.pop()
            if isinstance(item, Namespace):
                raise TemplateError("a namespace cannot be printed or compared")
            if isinstance(item, _COLLECTIONS):
                self.spend(1 + len(item))
                pending.extend(item)
                if isinstance(item, dict):
                    pending.extend(item.values())
            elif isinstance(item, str):
                self.touch(item)
            else:
                self.spend(1)
        return before - self.left

    def text(self, value: object) -> str:
        """``str(value)``, paid."""
        if isinstance(value, str):
            self.touch(value)
        else:
            self.spend(3 * self.weigh(value))
        return str(value)


def variables(values: Mapping[str, object], fuel: Fuel) -> dict[str, object]:
    """Variables of one rendering: ``values``, and its fuel."""
    return {**values, _KEY: fuel}


def fuel_of(context: Context) -> Fuel:
    """The fuel of the rendering that ``context`` belongs to."""
    fuel = context.parent[_KEY]
    assert isinstance(fuel, Fuel)
    return fuel
