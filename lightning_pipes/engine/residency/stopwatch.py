"""How long computations take on a device that the host runs ahead of."""

from __future__ import annotations

import time
from collections import deque

import torch


class Stopwatch:
    """The shortest of the computations that were timed, as the device ran them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._started = 0.0
        self._began: torch.cuda.Event | None = None
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._shortest = float("inf")

    def start(self) -> None:
        """A computation begins."""
        if self._on_gpu:
            self._began = self._now()
        else:
            self._started = time.monotonic()

    def stop(self) -> None:
        """It has been run, or on a GPU enqueued."""
        if self._began is None:
            self._shortest = min(self._shortest, time.monotonic() - self._started)
            return
        self._under_way.append((self._began, self._now()))
        self._began = None
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._read()

    def shortest_seconds(self) -> float:
        """Seconds of the shortest one; infinite where there was none. Waits until all have ended."""
        while self._under_way:
            self._under_way[0][1].synchronize()
            self._read()
        return self._shortest

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        began, ended = self._under_way.popleft()
        self._shortest = min(self._shortest, began.elapsed_time(ended) / 1e3)
