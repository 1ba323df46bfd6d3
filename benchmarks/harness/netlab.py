"""A network laboratory on one machine, with a host for each rank and links of adjustable speed between neighbors.

This module needs root on Linux. The hosts reach each other over a switch at full speed. In addition, neighbors in the
ring are connected by a cable of their own, which carries the messages between them. Each direction of a cable is
limited by a token bucket (Linux's tbf). No packet leaves the machine.
"""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TypeVar

from benchmarks.harness.namespaces import Hosts, enter, host_address
from benchmarks.harness.namespaces import unavailable_reason as why_no_hosts
from lightning_pipes.cost import Link

Direction = tuple[int, int]
"""A direction of a link: (source rank, target rank)."""
T = TypeVar("T")
GOODPUT = 0.954
"""Bytes of messages per byte that tbf counts, measured at up to 20 MB/s. The rest are headers and acknowledgements."""
BURST = 8 * 1024
"""Bytes that pass at full speed after the link was idle.

This is the smallest value that works. It should be small because every message appears shorter by this number of bytes.
"""
QUEUE = 2**20
"""Bytes that can wait before a link. Further bytes are dropped, as in a switch, and TCP sends them again."""
_CHUNK = 2**16


class NetLab(Hosts):
    """`n` hosts in a ring of shaped links, which exist while the context is open.

    The context must be opened and used from one thread. Only `shape` may be called from any thread. The ranks that
    `run_ranks` starts are on different hosts, so their messages use gloo without any setting.

    Args:
        n: the number of hosts.
        bandwidth: bytes of messages per second, for every link in each direction, or None for no limit. Up to 20 MB/s,
            the actual speed is within 0.5 % of this value if the machine keeps up.
        burst: bytes that pass at full speed after a link was idle.
        queue: bytes that can wait before a link.
        bands: whether the queue before a link is ordered by the priority of the connections (SO_PRIORITY), in the three
            bands of pfifo_fast. In this case, the queue is not limited in bytes.
    """

    def __init__(
        self, n: int, bandwidth: float | None = None, *, burst: int = BURST, queue: int = QUEUE, bands: bool = False
    ) -> None:
        super().__init__(n)
        self._bands = bands
        self._bandwidth = bandwidth
        self._burst, self._queue = burst, queue
        self._shapers: dict[int, _Shaper] = {}
        self._links: dict[Direction, Link] = {}
        self._lock = threading.Lock()

    @property
    def directions(self) -> list[Direction]:
        """Both directions of every link that has a cable.

        The cables connect neighbors in the ring, including the last host and the first one.
        """
        return [d for a, b in self._cables() for d in ((a, b), (b, a))]

    @property
    def links(self) -> dict[Direction, Link]:
        """The current speeds of the links, for a `CostModel`.

        They contain neither latency nor the time to prepare messages.
        """
        return dict(self._links)

    def shape(self, bandwidth: float | None, directions: Iterable[Direction] | None = None) -> None:
        """Set the speed of links.

        Bytes that are already queued continue at the new speed. The call takes about 0.3 ms for each direction.

        Args:
            bandwidth: bytes of messages per second, or None for no limit.
            directions: the directions to change, or None for all of them.

        Raises:
            PlanError: the bandwidth is not positive.
            KeyError: there is no such link.
            OSError: tc could not set the speed. The message contains its output.
        """
        link = Link() if bandwidth is None else Link(bandwidth, burst=GOODPUT * self._burst)
        for source, target in self.directions if directions is None else directions:
            if (source, target) not in self._links:
                raise KeyError(f"no link from rank {source} to rank {target}; there are {sorted(self._links)}")
            with self._lock:
                self._shapers[source].shape(_device(target), self._setting(bandwidth))
                self._links[source, target] = link

    @contextmanager
    def play_changes(self, changes: Iterable[tuple[float, float | None, list[Direction] | None]]) -> Iterator[None]:
        """Call `shape` at given times while the context is open.

        Args:
            changes: tuples of (seconds after the start, bandwidth, directions), in ascending order of time.
        """
        stopped = threading.Event()
        began = time.monotonic()

        def apply_changes() -> None:
            for at, bandwidth, directions in changes:
                if stopped.wait(max(0.0, began + at - time.monotonic())):
                    return
                self.shape(bandwidth, directions)

        with ThreadPoolExecutor(1) as pool:
            playing = pool.submit(apply_changes)
            try:
                yield
            finally:
                stopped.set()
        playing.result()

    @contextmanager
    def compete_on(
        self, source: int, target: int, flows: int = 1, on: float = float("inf"), off: float = 0.0, seed: int = 0
    ) -> Iterator[Competition]:
        """Create real traffic on a link while the context is open, by TCP connections that send as fast as possible.

        Args:
            source: the rank whose host sends.
            target: the rank whose host receives.
            flows: the number of connections.
            on: mean seconds for which each connection sends at a time. The durations are distributed exponentially.
            off: mean seconds for which each connection pauses, also distributed exponentially.
            seed: the seed of the random durations.
        """
        with self._call_on_host(target, lambda: socket.create_server((host_address(target), 0))) as server:
            there = server.getsockname()
            senders = [self._call_on_host(source, lambda: socket.create_connection(there)) for _ in range(flows)]
            receivers = [server.accept()[0] for _ in range(flows)]
        competition = Competition(senders, receivers, random.Random(seed), on, off)
        try:
            yield competition
        finally:
            competition.close()

    def _set_up(self) -> None:
        super()._set_up()
        for a, b in self._cables():
            peer = ("peer", "name", _device(a), "netns", str(self.holders[b]))
            self._run_inside(self.holders[a], "ip", "link", "add", _device(b), "type", "veth", *peer)
            for here, there in ((a, b), (b, a)):
                holder, device = self.holders[here], _device(there)
                self._run_inside(holder, "ip", "link", "set", device, "up")
                # if bbr is the default, it would continue for a while at a speed that it has measured earlier
                way = ("dev", device, "src", host_address(here), "congctl", "cubic")
                self._run_inside(holder, "ip", "route", "add", f"{host_address(there)}/32", *way)
        for host in range(self._n):
            self._shapers[host] = _Shaper(self._open_tc(host), self._bands)
        self._links = dict.fromkeys(self.directions, Link())
        self.shape(self._bandwidth)

    def _open_tc(self, host: int) -> subprocess.Popen[str]:
        """Start a tc process that stays open, so that a change of speed does not have to start a process."""
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.start(host, ["tc", "-force", "-batch", "-"], {}, bufsize=1, **streams)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            self._stack.callback(stream.close)
        return process

    def _cables(self) -> list[Direction]:
        return [(rank, (rank + 1) % self._n) for rank in range(self._n if self._n > 2 else 1)]

    def _setting(self, bandwidth: float | None) -> str:
        if bandwidth is None:
            return ""
        return f"tbf rate {round(8 * bandwidth / GOODPUT)}bit burst {self._burst} limit {self._queue}"

    def _call_on_host(self, host: int, make: Callable[[], T]) -> T:
        """Call `make` on a host and return its result. A socket stays in the network in which it was created."""

        def make_inside() -> T:
            enter(self.holders[host])
            return make()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make_inside).result()


class _Shaper:
    """Sets the token buckets of one host through a tc process that reads commands."""

    def __init__(self, process: subprocess.Popen[str], bands: bool) -> None:
        self._process, self._bands = process, bands
        self._shaped: set[str] = set()

    def shape(self, device: str, setting: str) -> None:
        """Set the token bucket of a device, or remove it if `setting` is empty."""
        if setting:
            command = f"qdisc replace dev {device} root handle 1: {setting}"
            if self._bands and device not in self._shaped:
                command += f"\nqdisc replace dev {device} parent 1:1 handle 10: pfifo_fast"
        elif device in self._shaped:
            command = f"qdisc del dev {device} root"
        else:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\nqdisc show dev {device}\n")
        self._process.stdin.flush()
        output = ""
        for line in self._process.stdout:
            if line.startswith("qdisc "):
                break
            output += line
        else:
            output += "tc has ended"
        if output:
            raise OSError(f"tc {command}: {output.strip()}")
        (self._shaped.add if setting else self._shaped.discard)(device)


class Competition:
    """TCP connections that send as fast as possible.

    Attributes:
        received: the number of bytes received so far.
        senders: the sending ends of the connections.
    """

    def __init__(
        self, senders: list[socket.socket], receivers: list[socket.socket], rng: random.Random, on: float, off: float
    ) -> None:
        self.received = 0
        self.senders = senders
        self._senders, self._receivers = senders, receivers
        self._ended = threading.Event()
        self._on, self._off = on, off
        works: list[tuple[Callable[..., None], tuple[object, ...]]] = [(self._receive, (r,)) for r in receivers]
        works += [(self._send, (s, random.Random(rng.random()))) for s in senders]
        self._threads = [threading.Thread(target=work, args=args, daemon=True) for work, args in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop sending and close all connections."""
        self._ended.set()
        for end in (*self._receivers, *self._senders):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (*self._receivers, *self._senders):
            end.close()

    def _receive(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while got := connection.recv(_CHUNK):
                self.received += len(got)

    def _send(self, connection: socket.socket, rng: random.Random) -> None:
        data = bytes(_CHUNK)
        with suppress(OSError):
            while not self._ended.is_set():
                until = time.monotonic() + (rng.expovariate(1 / self._on) if self._on < float("inf") else self._on)
                while time.monotonic() < until:
                    connection.sendall(data)
                self._ended.wait(rng.expovariate(1 / self._off) if self._off else 0.0)


@lru_cache(maxsize=1)
def lab_unavailable_reason() -> str:
    """Return the reason why a laboratory can't be created here, or an empty string if it can."""
    if reason := why_no_hosts():
        return reason
    try:
        with NetLab(2, bandwidth=1e7):
            return ""
    except OSError as error:
        return f"links can't be shaped here: {error}"


def _device(peer: int) -> str:
    """Return the name of the device that is connected to a neighbor's cable."""
    return f"to{peer}"
