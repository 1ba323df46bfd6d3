"""Messages that ranks leave for each other: who tells something goes on at once."""

from __future__ import annotations

import time
from typing import Any

from lightning_pipes.engine.watch.trust import TRUSTED, seal_of
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.packing import Packed, unpacked

_POLL_SECONDS = 0.0005


class Notices:
    """Messages by name, in the store that all ranks of the job have.

    Collective: all ranks make one together.
    """

    def __init__(self, control: Control) -> None:
        self._watch = control.watch
        self._store = control.watch.sub_store() if control.size > 1 else None
        self._seal = TRUSTED if seal_of(self._store) else None  # the store vouches for what is in it

    def put(self, name: str, message: Any) -> None:
        """Leaves a message, in place of an earlier one of the name. Alone on its control a rank leaves nothing."""
        if self._store is None:
            return
        self._store.set(name, b"".join(Packed(message, self._seal).parts))

    def remove(self, name: str) -> None:
        """Takes it away, if it is there."""
        if self._store is not None:
            self._store.delete_key(name)

    def find(self, name: str) -> Any:
        """The message, if it is there already; else None."""
        return self._read(name) if self._store is not None and self._store.check([name]) else None

    def get(self, name: str) -> Any:
        """The message of another rank, as soon as it is there.

        Raises:
            PeerFailure: another rank failed.
        """
        assert self._store is not None, "there is no other rank"
        while not self._store.check([name]):
            self._watch.check()
            time.sleep(_POLL_SECONDS)
        return self._read(name)

    def _read(self, name: str) -> Any:
        assert self._store is not None, "there is no other rank"
        return unpacked(memoryview(bytearray(self._store.get(name))), self._seal)
