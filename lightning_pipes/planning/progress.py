"""Progress bars for long computations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]
"""Called with the current step, and the share of all work that is done, 0 to 1."""


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar on stderr after one second, if that is a terminal."""
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
    with tqdm(total=1.0, desc=title, delay=1.0, leave=False, bar_format=form, disable=not sys.stderr.isatty()) as bar:

        def show_progress(what: str, done: float) -> None:
            bar.set_description_str(f"{title}: {what}"[:60], refresh=False)
            bar.update(max(0.0, done - bar.n))

        yield show_progress
