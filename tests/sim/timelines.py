"""A timeline that is small enough to check by hand."""

from lightning_pipes.ir import Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import uniform

PLAN, COSTS = uniform(2, 3, f=2, b=4, step=2, link=1, latency=1)
TIMELINE = simulate(OneFOneB().program(PLAN), PLAN, COSTS)
ONE = Span(0, 1)
