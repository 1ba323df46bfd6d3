"""Programs and policies in virtual time, and timelines, simulated or measured."""

from lightning_pipes.sim.event import Event
from lightning_pipes.sim.loops.kernel import load_kernel
from lightning_pipes.sim.shown.compare import Comparison, compare
from lightning_pipes.sim.shown.render import save_chrome_trace, save_png
from lightning_pipes.sim.simulator import Rehearsal, makespan, makespans, priced, simulate
from lightning_pipes.sim.spread import Spread, spread
from lightning_pipes.sim.timeline import Timeline

__all__ = [
    "Comparison",
    "Event",
    "Rehearsal",
    "Spread",
    "Timeline",
    "compare",
    "load_kernel",
    "makespan",
    "makespans",
    "priced",
    "save_chrome_trace",
    "save_png",
    "simulate",
    "spread",
]
