"""Rows about modules that are written in less usual ways."""

from __future__ import annotations

from functools import partial

from tests.compat import unusual_modules as m
from tests.compat.registry import row

odd = partial(row, "Less usual code")
for name, features in (
    ("a slice of the container", m.by_slice),
    ("children() of the container", m.by_children),
    ("a layer by its name", m.by_name),
):
    odd(f"{name} and all of it", module=partial(m.Features, features), reason="cut by units")
    odd(
        f"{name} and all of it, named container",
        module=partial(m.Features, features),
        strategy={"module": "model"},
        refused="or set PipelineStrategy(module=''), which cuts by units",
    )
odd("two slices of the container, one after the other", module=m.TwoSlices, strategy={"module": "model"})
