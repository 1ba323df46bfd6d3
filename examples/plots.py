"""Plots of a search in a job array, and of a search on a supernet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from optuna.trial import FrozenTrial, TrialState

from lightning_pipes.ir import Instruction
from lightning_pipes.sim import Timeline
from lightning_pipes.sim.records.render import draw_window

BLOCKS = 40
"""The number of blocks of a rank that the picture shows individually."""


def save_sweep(trials: Sequence[FrozenTrial], timeline: Timeline, path: Path, metric: str) -> None:
    """Plot the metric that each sibling reported, the time in which it trained, and a section of the timeline.

    Args:
        trials: the trials, in the order in which they began.
        timeline: the timeline of the job array.
        path: the file to which the figure is written.
        metric: the name of the metric, which the title of the figure shows.
    """
    colours = [colormaps["tab20"](n % 20) for n in range(len(trials))]
    figure = Figure(figsize=(13, 5.4 + 0.17 * len(trials)), layout="constrained")
    curves, lanes, moment = figure.subplots(3, 1, height_ratios=[3.0, 0.17 * len(trials) + 0.5, 1.3])
    _curves(curves, trials, colours, metric)
    _lanes(lanes, trials, timeline, colours)
    figure.draw_without_rendering()  # places the axes
    start, stop = _middle(timeline)

    def shade(i: Instruction) -> Any:
        return colours[i.job]

    draw_window(moment, timeline, start, stop, shade)
    moment.set_title(f"the pipeline after {start / 1e9:.1f} s: a letter a sibling, the number of its batch", **_HEADING)
    for axis in (curves, lanes):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Tried:
    """A subnet that a search has tried.

    Attributes:
        by: the name of the search.
        choices: the choice of each block.
        accuracy: the accuracy on the validation data, with the weights of the supernet.
        cost: the number of parameters.
        worth: the accuracy minus the price of the cost. A higher value is better.
    """

    by: str
    choices: tuple[int, ...]
    accuracy: float
    cost: int
    worth: float


def save_search(
    tried: Mapping[str, Sequence[Tried]], best: Tried, retrained: float, timeline: Timeline, path: Path
) -> None:
    """Plot accuracy against cost with the Pareto front, the progress of each search, and a section of the timeline.

    Args:
        tried: the subnets that each search tried, by the name of the search.
        best: the best of these subnets.
        retrained: the accuracy of the best subnet after it was trained from scratch.
        timeline: the timeline of the pipeline that trained the supernet.
        path: the file to which the figure is written.
    """
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3.0, 0.8], width_ratios=[1.6, 1.0])
    costs, progress = (figure.add_subplot(grid[0, column]) for column in range(2))
    moment = figure.add_subplot(grid[1, :])
    colours = dict(zip(tried, ("#9aa3b2", "#2f6fde", "#e07b2f"), strict=False))
    everything = [t for found in tried.values() for t in found]
    for name, found in tried.items():
        costs.plot(
            [t.cost for t in found], [t.accuracy for t in found], ".", color=colours[name], label=name, alpha=0.6
        )
        so_far = [max(t.worth for t in found[: n + 1]) for n in range(len(found))]
        progress.plot(range(1, len(found) + 1), so_far, color=colours[name], label=name)
    front = [t for t in everything if not any(o.cost <= t.cost and o.accuracy > t.accuracy for o in everything)]
    front.sort(key=lambda t: (t.cost, t.accuracy))
    costs.step([t.cost for t in front], [t.accuracy for t in front], where="post", color="black", linewidth=1)
    costs.plot(best.cost, best.accuracy, "o", markersize=11, markerfacecolor="none", color="black", label="the best")
    costs.plot(best.cost, retrained, "*", markersize=12, color="black", label="the best, trained again from scratch")
    costs.set_title("subnets with the supernet's weights, and the Pareto front", **_HEADING)
    costs.set_xlabel("parameters", fontsize=8)
    costs.set_ylabel("accuracy on validation", fontsize=8)
    costs.yaxis.set_major_formatter("{x:.0%}")
    costs.set_ylim(max(0.0, sorted(t.accuracy for t in everything)[len(everything) // 50] - 0.01), None)
    progress.set_title("best result so far: accuracy minus the price of parameters", **_HEADING)
    progress.set_xlabel("subnets tried", fontsize=8)
    for axis in (costs, progress):
        axis.legend(fontsize=7, frameon=False, loc="lower right")
    figure.draw_without_rendering()  # places the axes
    start, stop = _middle(timeline)

    def shade(i: Instruction) -> Any:
        return colormaps["tab20"](i.batch % 20)

    draw_window(moment, timeline, start, stop, shade)
    moment.set_title("training the supernet: a colour a subnet", **_HEADING)
    for axis in (costs, progress):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=120)


_HEADING: dict[str, Any] = {"loc": "left", "fontsize": 10}


def _curves(axis: Any, trials: Sequence[FrozenTrial], colours: Sequence[Any], metric: str) -> None:
    for trial, colour in zip(trials, colours, strict=True):
        values = [value for _, value in sorted(trial.intermediate_values.items())]
        steps = range(1, len(values) + 1)
        pruned = trial.state != TrialState.COMPLETE
        axis.plot(steps, values, "-", color=colour, linewidth=1.0 if pruned else 1.8, label=f"trial {trial.number}")
        if steps:
            axis.plot(steps[-1], values[-1], "x" if pruned else "o", color=colour, markersize=6 if pruned else 4)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("validation", fontsize=8)
    axis.set_title(f"{metric} of {len(trials)} siblings; a cross marks a pruned one", **_HEADING)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, ncols=-(-len(trials) // 16), frameon=False)


def _lanes(axis: Any, trials: Sequence[FrozenTrial], timeline: Timeline, colours: Sequence[Any]) -> None:
    """Draw a bar for each sibling, from its first computation to its last one."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = defaultdict(int)
    for e in timeline.computations:
        begins.setdefault(e.instruction.job, e.start)
        ends[e.instruction.job] = max(ends[e.instruction.job], e.end)
    for job, begin in begins.items():
        axis.barh(job, (ends[job] - begin) / 1e9, 0.72, begin / 1e9, color=colours[job])
        value = "" if trials[job].value is None else f"{trials[job].value:.3f}"
        said = value if trials[job].state == TrialState.COMPLETE else f"{trials[job].state.name.lower()} {value}"
        axis.text(ends[job] / 1e9, job, f" {said}", fontsize=7, va="center")
    axis.set_yticks(range(len(trials)), [f"trial {trial.number}" for trial in trials], fontsize=7)
    axis.set_ylim(len(trials) - 0.4, -0.6)
    axis.set_xlabel("time in s", fontsize=8)
    idle = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(timeline.bubble))
    axis.set_title(f"when they trained; idle: {idle}", **_HEADING)


def _middle(timeline: Timeline) -> tuple[int, int]:
    """Return the start and the end of an interval in which the first rank computes `BLOCKS` blocks, in nanoseconds."""
    mine = [e for e in timeline.computations if e.rank == 0 and e.end > e.start]
    first = max(0, len(mine) // 2 - BLOCKS // 2)
    return mine[first].start, mine[min(len(mine) - 1, first + BLOCKS)].end
