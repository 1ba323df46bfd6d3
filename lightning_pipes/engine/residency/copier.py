"""Copies between a device and the host that run in parallel to the computation."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, get_args

import torch

from lightning_pipes.ir.clock import read_nanoseconds, read_seconds

Way = Literal["in", "out"]
"""The direction of a copy: to the device or to the host."""


class SlabCopier(Protocol):
    """Copies slabs of bytes. A ticket stands for an operation that will end. Copies in one direction run in order."""

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Iterable[int] = ()) -> int:
        """Start a copy, and return its ticket.

        Args:
            way: the direction of the copy.
            target: the slab to which the bytes are copied.
            source: the slab from which the bytes are copied.
            after: tickets of operations that must end before the copy begins.

        Raises:
            RuntimeError: an earlier copy has failed.
        """

    def mark_computation(self) -> int | None:
        """Return a ticket for all computation so far, or None if it has already ended."""

    def is_done(self, ticket: int) -> bool:
        """Return whether the operation has ended."""

    def order_after(self, ticket: int) -> int:
        """Order all later computation after the copy. On a GPU, the host does not wait.

        Returns:
            The nanoseconds that the device has waited in calls of this method, if they are known and were not returned
            before.

        Raises:
            RuntimeError: the copy has failed.
        """

    def wait(self, ticket: int) -> None:
        """Wait on the host until the operation has ended.

        Raises:
            RuntimeError: the copy has failed.
        """

    @property
    def bandwidth(self) -> float | None:
        """The measured bytes per second during copies, or None before the first copy."""

    def close(self) -> int:
        """Finish all copies in flight, and accept no more copies.

        Returns:
            The nanoseconds of waits that `order_after` has not returned.
        """


class ThreadCopier:
    """Copies on the CPU, with one thread for each direction.

    Device and host share the same memory here, so a slow link can be emulated.

    Args:
        bandwidth: the bytes per second in each direction, if this is slower than memory.
    """

    def __init__(self, bandwidth: float | None = None) -> None:
        self._bandwidth = bandwidth
        self._tickets = itertools.count()
        self._under_way: dict[int, threading.Event] = {}
        self._error: BaseException | None = None
        self._bytes, self._busy = 0, 0.0
        self._tasks: dict[Way, queue.SimpleQueue[tuple[int, Callable[[], None]] | None]] = {}
        self._threads: list[threading.Thread] = []

    def _queue(self, way: Way) -> queue.SimpleQueue[tuple[int, Callable[[], None]] | None]:
        """Return the task queue of a direction. The first call for a direction starts its thread."""
        if way not in self._tasks:
            tasks = self._tasks[way] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._work, args=(tasks,), name=f"copies {way}", daemon=True))
            self._threads[-1].start()
        return self._tasks[way]

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Iterable[int] = ()) -> int:
        self._check()
        awaited = [event for ticket in after if (event := self._under_way.get(ticket)) is not None]

        def run() -> None:
            for event in awaited:
                event.wait()
            started = read_seconds()
            target.copy_(source)
            spent = read_seconds() - started
            if self._bandwidth is not None and (rest := source.numel() / self._bandwidth - spent) > 0:
                time.sleep(rest)
            self._busy += read_seconds() - started
            self._bytes += source.numel()

        ticket = next(self._tickets)
        self._under_way[ticket] = threading.Event()
        self._queue(way).put((ticket, run))
        return ticket

    def mark_computation(self) -> None:
        return None

    def is_done(self, ticket: int) -> bool:
        return ticket not in self._under_way

    def wait(self, ticket: int) -> None:
        self.order_after(ticket)

    def order_after(self, ticket: int) -> int:
        event = self._under_way.get(ticket)
        waited = 0
        if event is not None:
            started = read_nanoseconds()
            event.wait()
            waited = read_nanoseconds() - started
        self._check()
        return waited

    @property
    def bandwidth(self) -> float | None:
        return self._bytes / self._busy if self._busy else None

    def close(self) -> int:
        for tasks in self._tasks.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        return 0

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("a copy between host and device failed") from self._error

    def _work(self, tasks: queue.SimpleQueue[tuple[int, Callable[[], None]] | None]) -> None:
        while (task := tasks.get()) is not None:
            ticket, run = task
            try:
                run()
            except BaseException as error:  # the error is raised by later calls
                self._error = error
            self._under_way.pop(ticket).set()


class CudaCopier:
    """Copies on a GPU, with one stream for each direction.

    Copies are asynchronous if the slab on the host is pinned. No tensor is freed while a copy uses it, because the
    owner of a slab waits first. Therefore, `record_stream` is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Way, torch.cuda.Stream] = {
            way: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for way in get_args(Way)
        }
        self._tickets = itertools.count()
        self._events: dict[int, torch.cuda.Event] = {}
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # before and after waits of computation
        self._bytes, self._busy = 0, 0.0

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Iterable[int] = ()) -> int:
        stream = self._streams[way]
        for ticket in after:
            if ticket in self._events:
                stream.wait_event(self._events[ticket])
        with torch.cuda.stream(stream):
            started = self._event(stream)
            target.copy_(source, non_blocking=True)
            ended = self._event(stream)
        self._timed.append((started, ended, source.numel()))
        return self._ticket(ended)

    def mark_computation(self) -> int:
        return self._ticket(self._event(torch.cuda.current_stream(self._device)))

    def is_done(self, ticket: int) -> bool:
        event = self._events.get(ticket)
        return event is None or _has_ended(event)

    def order_after(self, ticket: int) -> int:
        if not self.is_done(ticket):  # the host continues, so that the device has work when the copy ends
            stream = torch.cuda.current_stream(self._device)
            before = self._event(stream)
            stream.wait_event(self._events[ticket])
            self._waits.append((before, self._event(stream)))
        return self._take_waited_ns()

    def wait(self, ticket: int) -> None:
        if ticket in self._events:
            self._events[ticket].synchronize()

    @property
    def bandwidth(self) -> float | None:
        self._collect_ended()
        return self._bytes / self._busy if self._busy else None

    def close(self) -> int:
        for stream in (*self._streams.values(), torch.cuda.current_stream(self._device)):
            stream.synchronize()
        self._collect_ended()
        return self._take_waited_ns()

    def _take_waited_ns(self) -> int:
        """Return the nanoseconds of waits that have ended since the last call."""
        ended = [each for each in self._waits if _has_ended(each[1])]
        self._waits = [each for each in self._waits if each not in ended]
        return round(1e6 * sum(float(before.elapsed_time(after)) for before, after in ended))

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _ticket(self, event: torch.cuda.Event) -> int:
        self._collect_ended()
        ticket = next(self._tickets)
        self._events[ticket] = event
        return ticket

    def _collect_ended(self) -> None:
        """Add up the bytes and times of copies that have ended."""
        self._events = {ticket: event for ticket, event in self._events.items() if not _has_ended(event)}
        for started, ended, size in self._timed:
            if _has_ended(ended):
                self._bytes += size
                self._busy += started.elapsed_time(ended) / 1e3
        self._timed = [each for each in self._timed if not _has_ended(each[1])]


def _has_ended(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def copier_for(device: torch.device, bandwidth: float | None = None) -> SlabCopier:
    """Return a copier between `device` and the host.

    Args:
        device: the device.
        bandwidth: the bytes per second of an emulated link; used only if the device is the CPU.
    """
    return CudaCopier(device) if device.type == "cuda" else ThreadCopier(bandwidth)


class Stopwatch:
    """Measures computations on the device, and keeps the shortest time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._started = 0.0
        self._began: torch.cuda.Event | None = None
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._shortest = float("inf")

    def start(self) -> None:
        """Start measuring a computation."""
        if self._on_gpu:
            self._began = self._now()
        else:
            self._started = read_seconds()

    def stop(self) -> None:
        """Stop measuring a computation, which has ended or, on a GPU, is enqueued."""
        if self._began is None:
            self._shortest = min(self._shortest, read_seconds() - self._started)
            return
        self._under_way.append((self._began, self._now()))
        self._began = None
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._read()

    def shortest_seconds(self) -> float:
        """Return the seconds of the shortest computation, or infinity if no computation was measured.

        The method waits until all measured computations have ended.
        """
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
