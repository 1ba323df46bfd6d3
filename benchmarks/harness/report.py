"""The command line of a benchmark, and its tables, numbers and pictures."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ---- Pictures: lines over numbers, or bars over names.


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with lines over numbers or bars over names.

    Attributes:
        title: the title of the panel.
        x_label: the label of the x axis.
        y_label: the label of the y axis.
        x: numbers for lines, names for bars.
        lines: the values at each x, by name. A single value is drawn as a horizontal line.
        logarithmic: whether the y axis is logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    x: list[Any]
    lines: dict[str, list[float]]
    logarithmic: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels side by side.

    Attributes:
        title: the title above all panels.
        panels: the panels, at most three in a row.
        one_scale: whether all panels share the scale of the y axis.
    """

    title: str
    panels: list[Panel] = field(default_factory=list)
    one_scale: bool = False


COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#d62728", "#7f7f7f", "#17becf", "#bcbd22")


def draw(picture: Picture, path: Path) -> None:
    """Write a picture to the file `path`."""
    from matplotlib.figure import Figure

    across = min(3, len(picture.panels))
    down = -(-len(picture.panels) // across)
    figure = Figure(figsize=(max(8.0, 4.6 * across), 3.5 * down + 1.0), layout="constrained")
    names = list(dict.fromkeys(name for panel in picture.panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    handles: dict[str, Any] = {}
    axes = [*figure.subplots(down, across, squeeze=False, sharey=picture.one_scale).flat]
    for axis in axes[len(picture.panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, picture.panels, strict=False):
        (_bars if isinstance(panel.x[0], str) else _lines)(axis, panel, colours)
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.logarithmic:
            axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for axis, panel in zip(axes, picture.panels, strict=False):
        if not panel.logarithmic:
            axis.set_ylim(bottom=0)  # after all lines are drawn, because this fixes the upper limit
    figure.suptitle(picture.title)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    figure.savefig(path, dpi=110)


def _lines(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    for name, values in panel.lines.items():
        if len(values) == 1:
            axis.axhline(values[0], label=name, color=colours[name], linestyle="--")
        else:
            axis.plot(panel.x, values, label=name, color=colours[name], marker="o" if len(panel.x) < 20 else None)


def _bars(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    width = 0.85 / len(panel.lines)
    for n, (name, values) in enumerate(panel.lines.items()):
        at = [i - 0.425 + (n + 0.5) * width for i in range(len(values))]
        axis.bar(at, values, width, label=name, color=colours[name])
    axis.set_xticks(range(len(panel.x)), panel.x)


@dataclass
class Report:
    """The table and the numbers of one part of a benchmark.

    Attributes:
        lines: the lines of the table.
        keys: the numbers for `--json`, by name.
        picture: a picture of the numbers, or None.
    """

    lines: list[str] = field(default_factory=list)
    keys: dict[str, float] = field(default_factory=dict)
    picture: Picture | None = None


def make_parser(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options `--quick` and `--json`.

    Args:
        doc: the docstring of the script, which `--help` prints unchanged.
        quick: the help of `--quick`, which describes what it leaves out, or None for no help.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    return parser


def run_parts(
    parts: Mapping[str, Callable[[bool], Report]], names: Iterable[str], quick: bool, pictures: Path | None = None
) -> dict[str, float]:
    """Run parts of a benchmark, print their tables, and return the keys of all of them.

    Args:
        parts: functions by name. Each one takes the value of `--quick` and returns a report.
        names: the parts to run, in order.
        quick: the value of `--quick`.
        pictures: a folder in which the picture of each part is saved as `NAME.png`, or None.
    """
    keys: dict[str, float] = {}
    for name in names:
        report = parts[name](quick)
        print("\n".join(report.lines) + "\n", flush=True)
        keys |= report.keys
        if pictures is not None and report.picture is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            draw(report.picture, pictures / f"{name}.png")
    return keys


def describe_machine() -> str:
    """Return the architecture of the processor and the number of its cores, as text."""
    return f"{platform.machine()}, {os.cpu_count()} cores"
