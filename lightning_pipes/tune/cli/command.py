"""The description of a command, and helpers that all commands share."""

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
    """One command of `lightning-pipes`.

    Attributes:
        config: the name of its settings in conf/; None for none.
        positionals: names of its positional arguments, in order.
        flags: by name, a placeholder for the value (empty for a switch) and a help text.
        defaults: overrides that repeat a default and that Hydra does not know.
        optional: whether all positionals may be left out.
        script: whether its last positional is a Python script, which gets the rest of the command line.
        translate: converts an override into Hydra's form.
        run: runs the command, given settings, positionals and flags.
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
    translate: Callable[[str], str] = lambda override: override


PICTURES = {
    "--png": ("FILE", "write the timeline as a picture"),
    "--html": ("FILE", "write the timeline as a page to zoom in"),
}


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table. The keys of the first row name the columns; numbers align to the right."""
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
    """Print one object on one line."""
    print(json.dumps(found))


def drawing_width() -> int:
    """Return the width of a drawing in characters."""
    return max(40, min(shutil.get_terminal_size((120, 24)).columns, 160) - 24)
