"""Leases whose order is known in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any


class LeaseOrder:
    """Predicts all leases that follow the current one.

    Args:
        device: the states of a device, whose `predict` is called.
        keys: the keys of the leases, in order.
    """

    def __init__(self, device: Any, keys: Iterable[Any] = ()) -> None:
        self._device, self._left = device, deque[Any]()
        self.extend(keys)

    def extend(self, keys: Iterable[Any]) -> None:
        """Add the leases that follow."""
        self._left.extend(keys)
        self._device.predict(self._left)

    def begin_next(self) -> Any:
        """Return the key of the next lease, which the caller takes at once."""
        key = self._left.popleft()
        self._device.predict(self._left)
        return key
