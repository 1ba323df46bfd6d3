"""The command line of a benchmark, its tables and numbers, and settings that keep Lightning from writing into them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Output = Iterator[str | dict[str, float]]
"""The output of a figure of a paper as it comes: lines of tables, and numbers by name."""


@dataclass
class Report:
    """The table and the numbers of one part of a benchmark.

    Attributes:
        lines: the lines of the table.
        keys: the numbers for `--json`, by name.
    """

    lines: list[str] = field(default_factory=list)
    keys: dict[str, float] = field(default_factory=dict)


def make_parser(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options `--quick` and `--json`.

    Args:
        doc: the docstring of the script, which `--help` prints unchanged.
        quick: the help of `--quick`, which describes what it leaves out, or None for no help.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print the headline numbers as JSON in the last line")
    return parser


def run_parts(parts: Mapping[str, Callable[[bool], Report]], names: Iterable[str], quick: bool) -> dict[str, float]:
    """Run parts of a benchmark, print their tables, and return the keys of all of them.

    Args:
        parts: functions by name. Each one takes the value of `--quick` and returns a report.
        names: the parts to run, in order.
        quick: the value of `--quick`.
    """
    keys: dict[str, float] = {}
    for name in names:
        report = parts[name](quick)
        print("\n".join(report.lines) + "\n", flush=True)
        keys |= report.keys
    return keys


def run_command(parser: argparse.ArgumentParser, parts: Mapping[str, Callable[[bool], Report]]) -> None:
    """Run the command line of a benchmark with several parts, of which `--only` selects one.

    Args:
        parser: the result of `make_parser`.
        parts: functions by name; see `run_parts`.
    """
    parser.add_argument("--only", choices=parts, help="run one part")
    options = parser.parse_args()
    print(f"{describe_machine()}, torch {torch.__version__}\n")
    keys = run_parts(parts, [options.only] if options.only else parts, options.quick)
    if options.json:
        print(json.dumps(keys))


def describe_machine() -> str:
    """Return the architecture of the processor and the number of its cores, as text."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that writes nothing."""


def hush() -> None:
    """Suppress all warnings in this process, and all messages of Lightning except errors."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def describe_allocator() -> str:
    """Return the name of the library that allocates memory in this process, and whether arrays use one heap."""
    from pathlib import Path

    from lightning_pipes.engine import allocator

    name = Path(allocator.find_library("malloc")).name
    return f"{name}, one heap in arrays" if allocator.can_set_options() else name
