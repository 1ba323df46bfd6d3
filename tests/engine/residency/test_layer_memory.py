"""Weight versions of PipeDream's first stage on a device with room for few versions, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_pipes.engine.compute.weights import OffloadedVersions, WeightVersion
from lightning_pipes.engine.residency.copier import SlabCopier, ThreadCopier, Way
from lightning_pipes.engine.residency.layer_memory import VersionMemory
from lightning_pipes.engine.residency.swap import Swap
from lightning_pipes.ir import Kind, PipelineError, PlanError, adapt_plan
from lightning_pipes.sim.residency import Statistics
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.generators import tiny_plan
from tests.engine.residency.virtual import Plain, Virtual

CPU = torch.device("cpu")
STAGES, BATCHES, WIDTH = 8, 40, 16
SIZE = 4 * WIDTH * WIDTH + 512
"""The bytes of a version, which is one linear layer."""
FORWARD, BACKWARD = 10_000_000, 30_000_000
"""The duration of a batch in nanoseconds. The backward includes a second forward."""


class Late:
    """A copier that delays each copy until a caller waits for it, or for a later copy in the same direction."""

    bandwidth = None

    def __init__(self) -> None:
        self.count = 0
        self.waiting: dict[int, tuple[Way, torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Iterable[int] = ()) -> int:
        self.count += 1
        self.waiting[self.count] = way, target, source, tuple(after)
        return self.count

    def mark_computation(self) -> None:
        return None

    def is_done(self, ticket: int) -> bool:
        return ticket not in self.waiting

    def order_after(self, ticket: int) -> int:
        if ticket in self.waiting:
            way = self.waiting[ticket][0]
            for number in [n for n, each in self.waiting.items() if n <= ticket and each[0] == way]:
                if number in self.waiting:  # otherwise, an earlier copy has waited for it
                    _, target, source, after = self.waiting[number]
                    for other in after:
                        self.order_after(other)
                    target.copy_(source)
                    self.waiting.pop(number, None)
        return 0

    def wait(self, ticket: int) -> None:
        self.order_after(ticket)

    def close(self) -> int:
        return 0


@dataclass
class States:
    """A provider of the swap that moves the versions."""

    swap: Swap[object]
    prefetch: bool = True

    def states(self, device: torch.device) -> Swap[object]:
        return self.swap


@dataclass
class Walk:
    """The results of a walk through the row of the first stage.

    Attributes:
        nanoseconds: the duration on the clock of the copier, or 0 if it has no clock.
        versions: the largest number of versions, including the live weights.
        bytes: the device memory for versions, without the live weights.
        statistics: the statistics of the swap.
    """

    nanoseconds: int
    versions: int
    bytes: int
    statistics: Statistics


def walk(
    slots: int,
    copier: SlabCopier,
    microbatches: int = 1,
    prefetch: bool = True,
    stages: int = STAGES,
    poison: bool = False,
) -> Walk:
    """Run the row of the first stage. All weights of a version equal its number, which is checked at each read."""
    plan = adapt_plan(tiny_plan(stages, microbatches), PipeDream())
    row = PipeDream().program(plan).unroll(BATCHES).head[0]
    swap: Swap[object] = Swap(slots * SIZE, copier, CPU, poison=poison)
    memory = VersionMemory(States(swap, prefetch), CPU)
    layer = nn.Linear(WIDTH, WIDTH)
    versions = OffloadedVersions({0: layer}, plan.versions[0], 0, memory, CPU)
    read: dict[int, tuple[WeightVersion, int]] = {}
    clock, newest, most, bytes_there = getattr(copier, "link", None), 0, 0, 0
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(newest)
        for at, i in enumerate(row):
            memory.upcoming = lambda at=at: (
                read[i.batch][0].key for i in row[at:] if i.kind is not Kind.STEP and i.batch in read
            )
            if i.kind is Kind.STEP:
                del read[i.batch]
                versions.before_update(version for version, _ in read.values())
                newest += 1
                for p in layer.parameters():
                    p.fill_(newest)
                versions.after_update()
                most = max(most, 1 + len(versions._kept))
                bytes_there = max(bytes_there, swap._slab_bytes)
                continue
            if i.batch not in read:
                current = versions.current_version()
                assert current is not None
                read[i.batch] = current, newest
            version, number = read[i.batch]
            with versions.on_device(version):
                assert all((p == number).all() for p in version.parameters[0].values()), i
                if clock is not None:
                    clock.now += FORWARD // microbatches if i.kind is Kind.F else BACKWARD // microbatches
    assert not versions._kept
    swap.close()
    return Walk(0 if clock is None else clock.now, most, bytes_there, swap.statistics)


@pytest.mark.parametrize(("slots", "share"), [(2, 0.3), (3, 0.45)])
def test_three_of_eight_versions_cost_little(slots: int, share: float) -> None:
    """Two or three slots for eight versions increase the time by at most 2 %.

    A copy takes `share` of the time of a batch's forward and backward. A share of 0.3 corresponds to weights of four
    bytes at 25 GB/s and 8192 tokens at 125 TFLOP/s, for any size of the stage.
    """
    found = walk(slots, Virtual(SIZE / (share * (FORWARD + BACKWARD) / 1e9)))
    assert found.nanoseconds <= 1.02 * BATCHES * (FORWARD + BACKWARD)
    assert found.versions == STAGES
    assert found.bytes == slots * SIZE < (STAGES - 1) * SIZE
    assert found.statistics.bytes_out <= BATCHES * SIZE  # each version at most once


def test_without_prefetching_every_backward_waits() -> None:
    found = walk(3, Virtual(SIZE / (0.3 * (FORWARD + BACKWARD) / 1e9)), prefetch=False)
    assert found.nanoseconds > 1.15 * BATCHES * (FORWARD + BACKWARD)


@pytest.mark.parametrize(
    ("slots", "microbatches", "bandwidth", "poison"),
    [(1, 1, 2e7, True), (2, 1, 2e7, True), (1, 2, 2e7, True), (2, 1, None, False), (3, 1, None, False)],
)
def test_versions_are_what_was_read(slots: int, microbatches: int, bandwidth: float | None, poison: bool) -> None:
    """Each batch reads the right version, also if copies are as late as possible.

    Without a bandwidth, nothing is copied before a caller waits for it, and slots are taken from versions that are
    still being copied.
    """
    copier = Late() if bandwidth is None else ThreadCopier(bandwidth)
    try:
        found = walk(slots, copier, microbatches, stages=6, poison=poison)
    finally:
        copier.close()
    assert found.bytes == min(slots, found.versions - 1) * SIZE
    # the first backward uses the live weights, which have not changed yet
    assert found.statistics.leases >= BATCHES - 1
    assert (found.statistics.bytes_in > 0) == (slots < found.versions - 1)


def test_weights_changed_by_other_code_are_noticed() -> None:
    swap: Swap[object] = Swap(SIZE, Virtual(1e9), CPU)
    layer = nn.Linear(WIDTH, WIDTH)
    versions = OffloadedVersions({0: layer}, 2, 0, VersionMemory(States(swap), CPU), CPU)
    version = versions.current_version()
    with versions.on_device(version):
        pass
    with torch.no_grad():
        layer.weight.mul_(2)
    with (
        pytest.raises(PipelineError, match=r"weights of stage 0 were changed between .* leave MemorySwap out"),
        versions.on_device(version),
    ):
        pass


def test_a_version_that_does_not_fit() -> None:
    """A version that is larger than the device budget is refused."""
    swap: Swap[object] = Swap(SIZE - 1, Virtual(1e9), CPU)
    versions = OffloadedVersions({0: nn.Linear(WIDTH, WIDTH)}, 2, 3, VersionMemory(States(swap), CPU), CPU)
    with pytest.raises(PlanError, match=r"state weights 1 of stage 3 has 1536 bytes, .* raise the budget"):
        versions.before_update([versions.current_version()])


def test_a_place_to_which_a_state_is_on_its_way() -> None:
    """A new state in a slot to which another state is still being loaded is not overwritten by the late copy."""
    copier = Late()
    swap: Swap[str] = Swap(512, copier, CPU)
    swap.add("loaded", loaded := Plain(torch.ones(128)))
    swap.predict(["loaded"])
    assert swap.prefetch_states() == 1
    swap.make("made", made := Plain(torch.zeros(128)))
    for ticket in list(copier.waiting):
        copier.wait(ticket)
    assert not made.x.any()
    swap.write_back("made")
    with swap.lease_state("loaded"):
        assert loaded.x.all()
    with swap.lease_state("made"):
        assert not made.x.any()
    assert swap.statistics.bytes_out == 512
