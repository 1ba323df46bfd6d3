"""Measures the network between neighboring ranks: message times, clock offsets, and bytes that wait to be sent.

Message times are end-to-end times, which include copies, serialization, and the wake-up of the receiver. Clock offsets
are computed from the time stamps of the sender and of the receiver that each message carries. The send queues of the
TCP connections of this process show whether messages are waiting for the network.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from lightning_pipes.cost import Link
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.messages.message import Message
from lightning_pipes.engine.watch.identity import read_boot_id, read_namespace
from lightning_pipes.ir import Instruction, Kind, Plan
from lightning_pipes.ir.clock import read_nanoseconds, read_seconds

PROBED_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22)
N_LINK_REPEATS = 9
_SMALL_MESSAGE_BYTES = 64


def measure_links(
    plan: Plan,
    rank: int,
    transport: Transport,
    sizes: Sequence[int] = PROBED_BYTES,
    repeats: int = N_LINK_REPEATS,
    device: torch.device | None = None,
) -> dict[tuple[int, int], Link]:
    """Measure the links from this rank to its neighbors.

    This is a collective call of all ranks of the pipeline, and must be made between windows. For each size, one rank
    sends a message and its peer answers with a small one, so that only the sender's clock is read. Half of the round
    trip of a small message is its one-way time, and is subtracted from the round trips of the other messages. The link
    is a fit of the median times.

    Args:
        plan: the plan, which defines the neighboring ranks.
        rank: the pipeline rank of the caller.
        transport: the transport of this rank.
        sizes: the sizes of the messages, in bytes.
        repeats: the number of round trips for each size.
        device: the device of the messages that are sent; the CPU by default.

    Returns:
        The measured links by (source rank, destination rank).
    """
    found: dict[tuple[int, int], Link] = {}
    edges = [s for s in range(plan.n_stages - 1) if plan.is_remote_edge(s)]
    pairs = {(plan.ranks[s], plan.ranks[s + 1]): s for s in reversed(edges)}  # one edge per pair of neighbors
    for phase in (0, 1):  # the pairs of one phase have no rank in common
        for (low, high), s in pairs.items():
            if s % 2 != phase or rank not in (low, high):
                continue
            forward, backward = Instruction(Kind.RF, s + 1), Instruction(Kind.RB, s)
            for source, target, there, back in ((low, high, forward, backward), (high, low, backward, forward)):
                exchange = _Exchange(transport, there, back, tuple(sizes), repeats, device)
                if rank == source:
                    found[source, target] = fit_link(exchange.measure_trips(target))
                else:
                    exchange.answer_trips(source)
    return found


def fit_link(seconds: Mapping[int, float]) -> Link:
    """Fit a link to measured message times.

    The time of the smallest message is taken as the latency. The bandwidth is a least-squares fit of the additional
    time to the additional bytes of larger messages.

    Args:
        seconds: one-way times in seconds, by message size in bytes.

    Returns:
        The link. Its bandwidth is infinite if larger messages did not take longer.
    """
    smallest = min(seconds)
    latency = seconds[smallest]
    extra = [(size - smallest, t - latency) for size, t in seconds.items() if size > smallest]
    moved = sum(size * t for size, t in extra)  # least squares through the origin, dominated by large messages
    return Link(sum(size * size for size, _ in extra) / moved if moved > 0 else float("inf"), max(latency, 0.0))


@dataclass(frozen=True)
class _Exchange:
    """Exchanges messages `there` and small replies `back`, which are named by the instructions that receive them."""

    transport: Transport
    there: Instruction
    back: Instruction
    sizes: tuple[int, ...]
    repeats: int
    device: torch.device | None

    def measure_trips(self, peer: int) -> dict[int, float]:
        """Return the one-way time of a message in seconds, by size in bytes."""
        trips: dict[int, list[float]] = {}
        for number, size in self._rounds():
            message = self._message(size)
            begun = read_seconds()
            self.transport.send(peer, (-number, self.there), message)
            self.transport.mailbox.wait((-number, self.back))
            trips.setdefault(size, []).append(read_seconds() - begun)
            self.transport.mailbox.take_message((-number, self.back))
        small = median(trips[_SMALL_MESSAGE_BYTES]) / 2
        return {_SMALL_MESSAGE_BYTES: small, **{size: median(trips[size]) - small for size in self.sizes}}

    def answer_trips(self, peer: int) -> None:
        """Answer all messages that `measure_trips` sends on the peer."""
        reply = self._message(_SMALL_MESSAGE_BYTES)
        for number, _ in self._rounds():
            self.transport.mailbox.wait((-number, self.there))
            self.transport.mailbox.take_message((-number, self.there))
            self.transport.send(peer, (-number, self.back), reply)

    def _message(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _rounds(self) -> list[tuple[int, int]]:
        """Return the number and size of each message. Sizes alternate, so that a disturbance affects all of them."""
        return list(enumerate((_SMALL_MESSAGE_BYTES, *self.sizes) * self.repeats, 1))


def clock_id() -> str:
    """Return an identifier of the monotonic clock of this process.

    Processes with the same identifier share a clock. The result is empty if the clock can't be identified, as on
    systems other than Linux.
    """
    boot = read_boot_id()
    return f"{boot}/{read_namespace('time')}" if boot else ""


def measure_offsets(
    plan: Plan, rank: int, transport: Transport, repeats: int = N_LINK_REPEATS, name: str | None = None
) -> dict[int, int]:
    """Measure the offset between the clock of this rank and the clocks of its neighbors.

    This is a collective call of all ranks of the pipeline, and must be made between windows. As in NTP, the offset is
    taken from the fastest of several round trips of tiny messages, and its error is half the difference between the
    times of the two directions. Messages with data are unsuitable, because their times in the two directions differ if
    the links differ.

    Args:
        plan: the plan, which defines the neighboring ranks.
        rank: the pipeline rank of the caller.
        transport: the transport of this rank.
        repeats: the number of round trips for each neighbor.
        name: the identifier of the clock of this rank, by default `clock_id()`.

    Returns:
        For each neighbor, the nanoseconds to add to its time stamps to convert them to the clock of this rank. The
        offset is 0 if both ranks share a clock.
    """
    offsets: dict[int, int] = {}
    edges = {
        (plan.ranks[s], plan.ranks[s + 1]): s for s in reversed(range(plan.n_stages - 1)) if plan.is_remote_edge(s)
    }
    mine = clock_id() if name is None else name
    for phase in (0, 1):  # the pairs of one phase have no rank in common
        for (low, high), stage in edges.items():
            if stage % 2 != phase or rank not in (low, high):
                continue
            line = _ClockExchange(
                transport, Instruction(Kind.RF, stage + 1), Instruction(Kind.RB, stage), repeats, mine
            )
            if rank == low:
                offsets[high] = line.measure_offset(high)
            else:
                offsets[low] = line.answer_probes(low)
    return offsets


class _ClockExchange(NamedTuple):
    """Exchanges tiny messages `there` and `back`, which are named by the instructions that receive them."""

    transport: Transport
    there: Instruction
    back: Instruction
    repeats: int
    clock: str

    def measure_offset(self, peer: int) -> int:
        best, found = None, 0
        for number in range(1, self.repeats + 1):
            sent = read_nanoseconds()
            self.transport.send(peer, (-number, self.there), (self.clock, torch.zeros(1)))
            reply = self._wait(number, self.back)
            theirs, arrived = reply.tree
            if theirs and theirs == self.clock:
                break  # both ends see that they share a clock
            took = (reply.arrived - sent) - (reply.sent - int(arrived))
            if best is None or took < best:
                best, found = took, (sent + reply.arrived - int(arrived) - reply.sent) // 2
        self.transport.send(peer, (-self.repeats - 1, self.there), ("", torch.tensor([found])))
        return found

    def answer_probes(self, peer: int) -> int:
        for number in range(1, self.repeats + 1):
            question = self._wait(number, self.there)
            stamp = torch.tensor([question.arrived or read_nanoseconds()])
            self.transport.send(peer, (-number, self.back), (self.clock, stamp))
            if question.tree[0] and question.tree[0] == self.clock:
                break
        return -int(self._wait(self.repeats + 1, self.there).tree[1])

    def _wait(self, number: int, i: Instruction) -> Message:
        self.transport.mailbox.wait((-number, i))
        message = self.transport.mailbox.take_message((-number, i))
        assert message is not None
        return message


SCAN_SECONDS = 0.5
"""Seconds between two scans for connections. Most connections are made at the start of a run."""
_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in the struct tcp_info of Linux, in bytes."""


class SocketQueues:
    """The send queues of all TCP connections of this process, including the private connections of gloo.

    Gloo completes a send as soon as the kernel has taken its bytes, which takes the same time for a receiver that is
    stopped. Therefore, only the queues of the kernel show whether a message still waits for the network.

    On systems other than Linux, no connections are found, and all counts are 0.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._looked = -SCAN_SECONDS

    def unsent_bytes(self) -> int:
        """Return the number of bytes that were sent and that the other ends have not acknowledged yet."""
        return sum(map(_waiting, self._scan()))

    def acknowledged_bytes(self) -> int:
        """Return the number of bytes that the other ends have acknowledged so far."""
        return sum(map(_acknowledged, self._scan()))

    def _scan(self) -> list[int]:
        now = time.monotonic()
        if sys.platform == "linux" and now - self._looked >= SCAN_SECONDS:
            self._looked, self._descriptors = now, list(_connections().values())
        return self._descriptors


def _waiting(descriptor: int) -> int:
    with suppress(OSError):  # the descriptor may have been closed or reused since the scan
        (size,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0\0\0\0"))
        return int(size)
    return 0


def _acknowledged(descriptor: int) -> int:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
        info = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        if len(info) == _BYTES_ACKED + 8:
            return int(struct.unpack_from("Q", info, _BYTES_ACKED)[0])
    return 0


def _connections() -> dict[int, int]:
    """Return one descriptor per TCP connection, by inode, because the scan itself duplicates some descriptors."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and status.st_ino not in found and _is_tcp(int(name)):
                found[status.st_ino] = int(name)
    return found


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as other:
        if other.family not in (socket.AF_INET, socket.AF_INET6) or other.type != socket.SOCK_STREAM:
            return False
        return not other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
