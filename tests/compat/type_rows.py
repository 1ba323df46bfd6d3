"""Rows about the types of what layers return."""

from __future__ import annotations

from functools import partial

from tests.compat import type_modules as t
from tests.compat.registry import row

types = partial(row, "Types that layers return")
for kind in t.TYPES:
    types(kind, module=partial(t.ReturnsType, kind), evaluate=True)
types(
    "a tensor with an attribute",
    module=partial(t.ReturnsMarked, False),
    refused="with the attribute 'scale', which the next stage would not get",
)
types("a tensor with an attribute, by units", module=partial(t.ReturnsMarked, False), strategy={"module": ""})
types(
    "a tensor of a subclass",
    module=partial(t.ReturnsMarked, True),
    refused="a tensor of the subclass tests.compat.type_modules.Marked",
)
types(
    "a tensor of a subclass, by units",
    module=partial(t.ReturnsMarked, True),
    strategy={"module": ""},
    refused="a tensor of the subclass tests.compat.type_modules.Marked",
)
