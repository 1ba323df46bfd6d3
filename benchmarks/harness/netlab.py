"""A network laboratory on one machine: a host for each rank, and links between neighbours with adjustable speed. Needs
root on Linux.

Hosts reach each other over a switch at full speed. Neighbours in the ring also have a cable of their own for their
messages. Each of its directions has a token bucket (Linux's tbf). Nothing leaves the machine.
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
"""(from rank, to rank)"""
T = TypeVar("T")
GOODPUT = 0.954
"""Bytes of messages in a byte that tbf counts; the rest are headers and acknowledgements. Measured, up to 20 MB/s."""
BURST = 8 * 1024
"""Bytes that pass at full speed after idleness: as few as work, as a message looks so much shorter."""
QUEUE = 2**20
"""Bytes that may wait before a link; more bytes are dropped, as in a switch, and TCP sends it again."""
_PORT = 7000
_CHUNK = 2**16


class NetLab(Hosts):
    """`n` hosts in a ring of shaped links, while the context is open. Opened and used from one thread, except for
    `shape`, which any thread may call.

    Ranks started by `run_ranks` are on different hosts, so their messages go over gloo without a setting.

    Args:
        bandwidth: bytes of messages per second, of every link and direction; None is without a limit. Up to 20 MB/s it
            holds within 0.5 % on a machine that keeps up.
        burst: bytes that pass at full speed after idleness.
        queue: bytes that may wait before a link.
        bands: what waits before a link goes by the priority of its connection (SO_PRIORITY), in three bands
            (pfifo_fast), and is not counted in bytes.
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
        """Every link and direction that has a cable: neighbours in the ring, including the last with the first."""
        return [d for a, b in self._cables() for d in ((a, b), (b, a))]

    @property
    def links(self) -> dict[Direction, Link]:
        """The current speeds of the links, for a `CostModel`; latency and the computing of messages are unknown
        here."""
        return dict(self._links)

    def shape(self, bandwidth: float | None, directions: Iterable[Direction] | None = None) -> None:
        """Set the bytes of messages per second of links, by default of all; None removes the limit. Queued bytes
        continue at the new speed. It takes about 0.3 ms for each direction.

        Raises:
            PlanError: no positive bandwidth.
            KeyError: no such link.
            OSError: it can't be set; with the output of tc.
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
        """Call `shape` at set times while the context is open.

        Args:
            changes: (seconds after the start, bandwidth, directions), times ascending.
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
        """Create real traffic on a link while the context is open: TCP connections that send as fast as they may.

        Args:
            on, off: mean seconds that each connection sends and pauses, both exponential.
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
                # bbr, where it is the default, would go on for a while with a speed that it has measured before
                way = ("dev", device, "src", host_address(here), "congctl", "cubic")
                self._run_inside(holder, "ip", "route", "add", f"{host_address(there)}/32", *way)
        for host in range(self._n):
            self._shapers[host] = _Shaper(self._open_tc(host), self._bands)
        self._links = dict.fromkeys(self.directions, Link())
        self.shape(self._bandwidth)

    def _open_tc(self, host: int) -> subprocess.Popen[str]:
        """Start a tc that stays open, so that a change of speed starts no process."""
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
        """Return the result of `make` on a host: a socket stays in the network of its creation."""

        def make_inside() -> T:
            enter(self.holders[host])
            return make()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make_inside).result()


class _Shaper:
    """Sets the token buckets of one host, by a tc that takes commands."""

    def __init__(self, process: subprocess.Popen[str], bands: bool) -> None:
        self._process, self._bands = process, bands
        self._shaped: set[str] = set()

    def shape(self, device: str, setting: str) -> None:
        """Set the bucket of a device; an empty setting removes it."""
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
    """Connections that send as fast as they may.

    Attributes:
        received: bytes received so far.
        senders: the ends that send.
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
        """Close the connections."""
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
    """Return why no lab can be created here; empty if one can."""
    if reason := why_no_hosts():
        return reason
    try:
        with NetLab(2, bandwidth=1e7):
            return ""
    except OSError as error:
        return f"links can't be shaped here: {error}"


def _device(peer: int) -> str:
    """Return the name of the device of a cable to a neighbour."""
    return f"to{peer}"
