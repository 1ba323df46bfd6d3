"""Rows about what modules keep besides weights: modes of layers, attributes, buffers, what layers leave."""

from __future__ import annotations

from functools import partial

from tests.compat import state_modules as s
from tests.compat.registry import row

state = partial(row, "State")
state("layers put into eval() before fit", module=s.FrozenNorms, watch=s.modes)
state("a part of a layer, and one outside of the layers, put into eval() before fit", module=s.PartlyFrozen)
