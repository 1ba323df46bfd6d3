"""The description of a command, and helpers that several commands share."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig


@dataclass(frozen=True)
class Command:
    """A command of `lightning-pipes`.

    Attributes:
        name: the name of the command.
        about: the description of the command in its help text.
        examples: command lines that the help text shows.
        run: runs the command, given its settings, its positional arguments and its flags.
        config: the name of the settings file in conf/, or None if the command has no settings.
        positionals: the names of the positional arguments, in order.
        flags: for each flag, a placeholder for its value, which is empty for a switch, and a help text.
        defaults: overrides that repeat a default value but are not accepted by Hydra. They are ignored.
        optional: whether all positional arguments can be omitted.
        script: whether the last positional argument is a Python script, which receives the rest of the command line.
    """

    name: str
    about: str
    examples: Sequence[str]
    run: Callable[[DictConfig, Sequence[str], argparse.Namespace], None]
    config: str | None = None
    positionals: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    defaults: frozenset[str] = frozenset()
    optional: bool = False
    script: bool = False


PICTURE_OPTIONS = {
    "--png": ("FILE", "write the timeline as a picture"),
    "--html": ("FILE", "write the timeline as a page to zoom in"),
}


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table.

    The keys of the first row are the column heads. Columns of numbers are aligned to the right.
    """
    if not rows:
        return ""
    heads = list(rows[0])
    cells = [[str(row.get(head, "")) for head in heads] for row in rows]
    right = [all(_is_number(row[n]) for row in cells) for n in range(len(heads))]
    widths = [max(len(head), *(len(row[n]) for row in cells)) for n, head in enumerate(heads)]

    def format_line(texts: Sequence[str]) -> str:
        shown = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True))
        return "  ".join(shown).rstrip()

    return "\n".join(map(format_line, [heads, *cells]))


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit() or (text[0] in "+-" and text[1:2].isdigit())


def print_json(found: Mapping[str, Any]) -> None:
    """Print a mapping as one JSON object on one line."""
    print(json.dumps(found))


def drawing_width() -> int:
    """Return the width of a drawing of a timeline in characters."""
    return max(40, min(shutil.get_terminal_size((120, 24)).columns, 160) - 24)
