"""Measures the time of computations on a device that the host runs ahead of."""

from __future__ import annotations

import time
from collections import deque

import torch


class Stopwatch:
    """Keeps the shortest time of timed computations on the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._started = 0.0
        self._began: torch.cuda.Event | None = None
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._shortest = float("inf")

    def start(self) -> None:
        """Start timing a computation."""
        if self._on_gpu:
            self._began = self._now()
        else:
            self._started = time.monotonic()

    def stop(self) -> None:
        """Stop timing a computation that has run, or is enqueued on a GPU."""
        if self._began is None:
            self._shortest = min(self._shortest, time.monotonic() - self._started)
            return
        self._under_way.append((self._began, self._now()))
        self._began = None
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._read()

    def shortest_seconds(self) -> float:
        """Return the seconds of the shortest computation; infinite where there was none. Waits until all have ended."""
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
