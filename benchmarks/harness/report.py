"""The command line of a benchmark, and its tables and numbers."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.pictures import Picture, draw


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
