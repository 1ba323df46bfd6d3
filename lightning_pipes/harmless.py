"""Code of ours that runs in programs which never asked for us, and must not end them.

Whoever imports Lightning, or starts a Hydra app, where this package is installed runs some of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("lightning_pipes")
_told: set[str] = set()


@contextmanager
def harmless(what: str) -> Iterator[None]:
    """Logs an error in the block, once, and goes on behind it.

    Args:
        what: can't be used then.
    """
    try:
        yield
    except Exception as error:  # of any kind, or the program would end by it
        text = f"{what} of lightning_pipes can't be used: {type(error).__name__}: {error}"
        if text not in _told:
            _told.add(text)
            _log.warning(text)
            _log.debug("It was raised here:", exc_info=True)
