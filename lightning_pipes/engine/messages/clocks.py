"""Measures the offsets of neighbours' clocks: a message has stamps of its sender's and its receiver's clock."""

from __future__ import annotations

import os
import sys
import time
from typing import NamedTuple

import torch

from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.messages.message import Message
from lightning_pipes.ir import Instruction, Kind, Plan

REPEATS = 9


def clock_id() -> str:
    """Return a name for the monotonic clock of this process: processes with the same name share a clock. Empty if
    unknown."""
    if sys.platform != "linux":
        return ""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    try:
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel without namespaces of time
        return boot


def measure_offsets(
    plan: Plan, rank: int, transport: Transport, repeats: int = REPEATS, name: str | None = None
) -> dict[int, int]:
    """Return the nanoseconds to add to each neighbour's stamps to convert them to this rank's clock; 0 for a shared
    clock.

    A collective call of all ranks of the pipeline, between windows. As in NTP, the fastest of several round trips of
    tiny messages counts. The error is half the difference between its two directions. Messages with data would not
    do, because they take unequally long where links differ.

    Args:
        name: the name of this rank's clock, by default `clock_id()`.
    """
    offsets: dict[int, int] = {}
    edges = {
        (plan.ranks[s], plan.ranks[s + 1]): s for s in reversed(range(plan.n_stages - 1)) if plan.is_remote_edge(s)
    }
    mine = clock_id() if name is None else name
    for phase in (0, 1):  # neighbours of one phase have no rank in common
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
    """Tiny messages `there` and `back`, named by the instructions that receive them."""

    transport: Transport
    there: Instruction
    back: Instruction
    repeats: int
    clock: str

    def measure_offset(self, peer: int) -> int:
        best, found = None, 0
        for number in range(1, self.repeats + 1):
            sent = time.monotonic_ns()
            self.transport.send(peer, (-number, self.there), (self.clock, torch.zeros(1)))
            reply = self._wait(number, self.back)
            theirs, arrived = reply.tree
            if theirs and theirs == self.clock:
                break  # the same one: both know
            took = (reply.arrived - sent) - (reply.sent - int(arrived))
            if best is None or took < best:
                best, found = took, (sent + reply.arrived - int(arrived) - reply.sent) // 2
        self.transport.send(peer, (-self.repeats - 1, self.there), ("", torch.tensor([found])))
        return found

    def answer_probes(self, peer: int) -> int:
        for number in range(1, self.repeats + 1):
            question = self._wait(number, self.there)
            stamp = torch.tensor([question.arrived or time.monotonic_ns()])
            self.transport.send(peer, (-number, self.back), (self.clock, stamp))
            if question.tree[0] and question.tree[0] == self.clock:
                break
        return -int(self._wait(self.repeats + 1, self.there).tree[1])

    def _wait(self, number: int, i: Instruction) -> Message:
        self.transport.mailbox.wait((-number, i))
        message = self.transport.mailbox.take_message((-number, i))
        assert message is not None
        return message
