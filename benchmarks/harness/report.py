"""The command line of a benchmark, and its tables and numbers."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ---- Pictures of numbers: lines over a number, or bars by name.


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        x: numbers for lines, names for bars.
        lines: values at each x, by name; one value stands for all.
        logarithmic: whether the y axis is.
    """

    title: str
    x_label: str
    y_label: str
    x: list[Any]
    lines: dict[str, list[float]]
    logarithmic: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels side by side; with `one_scale` the y axes are the same."""

    title: str
    panels: list[Panel] = field(default_factory=list)
    one_scale: bool = False


COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#d62728", "#7f7f7f", "#17becf", "#bcbd22")


def draw(picture: Picture, path: Path) -> None:
    """Writes the picture to `path`."""
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
            axis.set_ylim(bottom=0)  # once all lines are there: it keeps the top where it is
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
    """A table, and its numbers.

    Attributes:
        lines: the table.
        keys: numbers for machines.
        picture: of the numbers, where there is one.
    """

    lines: list[str] = field(default_factory=list)
    keys: dict[str, float] = field(default_factory=dict)
    picture: Picture | None = None


def make_parser(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--quick` and `--json`.

    Args:
        doc: the docstring of the script.
        quick: what `--quick` leaves out; None for a short help.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    return parser


def run_parts(
    parts: Mapping[str, Callable[[bool], Report]], names: Iterable[str], quick: bool, pictures: Path | None = None
) -> dict[str, float]:
    """Run parts of a benchmark, print their tables, and return all keys.

    Args:
        pictures: a folder for `NAME.png` of each part that has a picture.
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
    """Return the processor and its cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"
