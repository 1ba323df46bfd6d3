"""Simulation of programs and policies in virtual time, and timelines of simulated and measured runs."""

from lightning_pipes.sim.loops.kernel import load_kernel
from lightning_pipes.sim.records.compare import TimelineComparison, compare_timelines
from lightning_pipes.sim.records.render import save_chrome_trace, save_png
from lightning_pipes.sim.simulator import (
    CompiledSimulation,
    Spread,
    cost_representatives,
    draw_spread,
    makespan,
    makespans,
    simulate,
)
from lightning_pipes.sim.timeline import Event, Timeline

__all__ = [
    "TimelineComparison",
    "Event",
    "CompiledSimulation",
    "Spread",
    "Timeline",
    "compare_timelines",
    "load_kernel",
    "makespan",
    "makespans",
    "cost_representatives",
    "save_chrome_trace",
    "save_png",
    "simulate",
    "draw_spread",
]
