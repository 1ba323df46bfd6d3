"""Messages between ranks through a store. The sender never blocks."""

from __future__ import annotations

import time
from typing import Any

from lightning_pipes.engine.watch.trust import TRUSTED_SEAL, seal_of
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.mesh import PackedObject, unpack_object

_NOTICE_POLL_SECONDS = 0.0005


class Notices:
    """Named messages in the store that all ranks of the job share.

    Collective: all ranks create one together.
    """

    def __init__(self, control: Control) -> None:
        self._watch = control.watch
        self._store = control.watch.sub_store() if control.size > 1 else None
        self._seal = TRUSTED_SEAL if seal_of(self._store) else None  # the store authenticates its values

    def put(self, name: str, message: Any) -> None:
        """Store a message, which replaces an earlier message of the same name. A single rank stores nothing."""
        if self._store is None:
            return
        self._store.set(name, b"".join(PackedObject(message, self._seal).parts))

    def remove(self, name: str) -> None:
        """Delete the message if it exists."""
        if self._store is not None:
            self._store.delete_key(name)

    def find(self, name: str) -> Any:
        """Return the message if it has arrived; None otherwise."""
        return self._read(name) if self._store is not None and self._store.check([name]) else None

    def get(self, name: str) -> Any:
        """Wait for a message of another rank, and return it.

        Raises:
            PeerFailure: another rank has failed.
        """
        assert self._store is not None, "there is no other rank"
        while not self._store.check([name]):
            self._watch.check()
            time.sleep(_NOTICE_POLL_SECONDS)
        return self._read(name)

    def _read(self, name: str) -> Any:
        assert self._store is not None, "there is no other rank"
        return unpack_object(memoryview(bytearray(self._store.get(name))), self._seal)
