"""Rows about the types of values that layers return."""

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
for loop, container in ((False, "a Sequential"), (True, "a loop over layers")):
    types(
        f"graphs merged into one, in a separate class, {container}, microbatches=1",
        module=partial(t.ConvolvesGraphs, loop),
        loaders=partial(t.graph_loaders, False),
        strategy={"microbatches": 1},
    )
    types(
        f"graphs merged into one, in a dict, {container}",
        module=partial(t.ConvolvesGraphs, loop),
        loaders=partial(t.graph_loaders, True, validates=not loop),
        refused="needs PipelineStrategy(microbatches=1)",
    )
types(
    "graphs merged into one, in a separate class, by units, microbatches=1",
    module=partial(t.ConvolvesGraphs, True),
    loaders=partial(t.graph_loaders, False),
    strategy={"module": "", "microbatches": 1},
)
