"""How far something is, for people who wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]
"""Told what is done now, and how much of all is done, 0 to 1."""


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Shows how far something is, once it has taken a second, on stderr, if that is a terminal."""
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
    with tqdm(total=1.0, desc=title, delay=1.0, leave=False, bar_format=form, disable=not sys.stderr.isatty()) as bar:

        def told(what: str, done: float) -> None:
            bar.set_description_str(f"{title}: {what}"[:60], refresh=False)
            bar.update(max(0.0, done - bar.n))

        yield told
