"""Writes timelines to files."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_pipes.ir import InputError
from lightning_pipes.planning.advice import Advice, advise_run
from lightning_pipes.planning.formatting import Progress
from lightning_pipes.sim import save_png
from lightning_pipes.sim.page import render_page
from lightning_pipes.sim.records.record import RunRecord


def write_pictures(
    record: RunRecord, options: argparse.Namespace, progress: Progress, advice: Advice | None = None
) -> list[str]:
    """Write the files that the options --png and --html name, and return one line of text per file.

    Args:
        record: the run to draw.
        options: the parsed command line.
        progress: shows the progress of `advise_run`.
        advice: the advice on the page. By default, it is the result of `advise_run`.

    Raises:
        InputError: the folder of a file does not exist.
    """
    lines = []
    if options.png:
        save_png(record.displayed_timeline, check_writable(options.png))
        lines.append(f"picture: {options.png}")
    if options.html:
        text = render_page(record, advice or advise_run(record, progress))
        check_writable(options.html).write_text(text, encoding="utf-8")
        lines.append(f"page: {options.html}")
    return lines


def check_writable(name: str) -> Path:
    """Return the path of a file after checking that its folder exists.

    Raises:
        InputError: the folder does not exist.
    """
    path = Path(name)
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} into")
    return path
