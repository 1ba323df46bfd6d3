"""Jobs whose states are swapped on a device compute the same results as jobs that stay there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine.residency.binding import Binding
from lightning_pipes.engine.residency.copier import SlabCopier, ThreadCopier
from lightning_pipes.engine.residency.slab import SLAB_ALIGNMENT_BYTES, SlabLayout
from lightning_pipes.engine.residency.swap import Swap
from lightning_pipes.ir import PipelineError, PlanError
from tests.cases import for_each
from tests.engine.residency.virtual import Plain, Virtual
from tests.sim.lease_order import LeaseOrder

CPU = torch.device("cpu")
MILLI = 1_000_000


@contextmanager
def threads(bandwidth: float | None = None) -> Iterator[ThreadCopier]:
    """Yield a thread copier and close it afterwards."""
    copier = ThreadCopier(bandwidth)
    try:
        yield copier
    finally:
        copier.close()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4), nn.LayerNorm(4))


class Job:
    """A model with its optimizer and its data."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.number, self.step = number, 0
        self.model = network()
        kinds: list[Any] = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
        self.optimizer = kinds[number % 4](self.model.parameters(), lr=1e-2 * (1 + number))
        self.losses: list[float] = []
        self.loss: torch.Tensor | None = None

    def forward(self) -> None:
        g = torch.Generator().manual_seed(1000 * self.number + self.step)
        self.loss = self.model(torch.randn(8, 16, generator=g)).square().sum()
        self.losses.append(float(self.loss.detach()))

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def result(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        moments = [v.tolist() for s in state.values() for v in s.values()]
        return [self.losses, [t.tolist() for t in self.model.state_dict().values()], moments]


def begun(number: int) -> Job:
    """Return a job after its first step, when its optimizer has allocated all its states."""
    job = Job(number)
    job.forward()
    job.backward()
    job.update()
    return job


def swapped(jobs: list[Job], copier: SlabCopier, slots: int, rounds: int, ahead: bool = True) -> Swap[int]:
    """Train jobs in turn, each with one lease for forward and backward and one lease for the step.

    Evicted slabs are filled with NaN.
    """
    bindings = [Binding(job.model, [job.optimizer], CPU) for job in jobs]
    swap: Swap[int] = Swap(1 << 30, copier, CPU, slots=slots, poison=True)
    for job, binding in zip(jobs, bindings, strict=True):
        swap.add(job.number, binding)
    order = LeaseOrder(swap, [job.number for _ in range(rounds) for job in jobs for _ in range(2)])
    if ahead:
        swap.prefetch_states()
    for _ in range(rounds):
        for job in jobs:
            for part in ((job.forward, job.backward), (job.update,)):
                with swap.lease_state(order.begin_next(), write=True):
                    if ahead:
                        swap.prefetch_states()
                    for do in part:
                        do()
                    if isinstance(copier, Virtual):
                        copier.link.now += MILLI
                    bindings[job.number].rebind_replaced(swap.on_device(job.number))
    swap.flush()
    return swap


@for_each("slots", [1, 2, 3, 5])
@for_each("bandwidth", [None, 2e7])
def test_bit_for_bit(slots: int, bandwidth: float | None) -> None:
    """Five swapped jobs give the same losses, weights and optimizer states as jobs that are not swapped, bit by bit.

    The jobs have different optimizers, gradients that exist while the state is evicted, and running statistics.
    """
    expected = []
    for number in range(5):
        job = begun(number)
        for _ in range(4):
            job.forward()
            job.backward()
            job.update()
        expected.append(job.result())
    jobs = [begun(number) for number in range(5)]
    with threads(bandwidth) as copier:
        swap = swapped(jobs, copier, slots, rounds=4)
        for job in jobs:  # the host has the complete state
            Binding(job.model, [job.optimizer], CPU).bind_tensors(swap._states[job.number].on_host)
    assert [job.result() for job in jobs] == expected
    found = swap.statistics
    assert found.hits + found.late + found.misses == 5 * 4 * 2
    assert (slots < 5) == (found.bytes_in > swap.host_bytes)
    assert found.bytes_out > 0


def test_all_hits_where_states_move_within_a_block() -> None:
    """All leases except the first find their state on the device if copying is much faster than computing.

    This is condition E2 of ArrayPipe with a margin: a lease takes 1 ms, and a copy 0.1 ms in each direction. Without
    prefetching, many leases wait.
    """
    jobs = [begun(number) for number in range(4)]
    size = SlabLayout.from_tensors(Binding(jobs[0].model, [jobs[0].optimizer], CPU).named_tensors()).nbytes
    copier = Virtual(size / 1e-4)
    copier.link.now = 0
    found = swapped(jobs, copier, slots=2, rounds=5).statistics
    assert (found.misses, found.late, found.hits) == (0, 1, 39), "the first one has nothing to hide behind"
    jobs = [begun(number) for number in range(4)]
    without = swapped(jobs, Virtual(size / 1e-4), slots=2, rounds=5, ahead=False).statistics
    assert without.misses > 10
    assert without.hits + without.misses == 40
    assert without.stall_ns > 10 * found.stall_ns


def test_stalls_where_the_link_is_too_slow() -> None:
    """If a copy takes longer than a lease, many leases wait."""
    jobs = [begun(number) for number in range(4)]
    size = SlabLayout.from_tensors(Binding(jobs[0].model, [jobs[0].optimizer], CPU).named_tensors()).nbytes
    found = swapped(jobs, Virtual(size / 3e-3), slots=2, rounds=5).statistics
    assert found.late > 10
    assert found.stall_ns > 10 * MILLI


def test_a_slab_that_is_taken_too_early_is_noticed() -> None:
    """Autograd detects that a tensor saved by a forward was overwritten, and parameters in a graph cannot be moved."""
    job = begun(0)
    binding = Binding(job.model, [job.optimizer], CPU)
    layout = SlabLayout.from_tensors(binding.named_tensors())
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    with torch.no_grad():
        for name, view in layout.view_tensors(slab).items():
            view.copy_(binding.named_tensors()[name])
    binding.bind_tensors(layout.view_tensors(slab))
    job.forward()
    with pytest.raises(PipelineError, match=r"1.weight can't be moved .* a graph still refers"):
        binding.bind_tensors({name: t.clone() for name, t in layout.view_tensors(slab).items()})
    slab.copy_(torch.zeros_like(slab))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        job.backward()


def test_parameters_stay_who_they_are() -> None:
    """After binding to other memory, parameters are the same objects with their attributes and gradients."""
    job = Job(0)
    p = next(job.model.parameters())
    p.tag = "mine"  # type: ignore[attr-defined]
    p.requires_grad_(False)
    p.grad = torch.ones_like(p)
    binding = Binding(job.model, [job.optimizer], CPU)
    before = binding.named_tensors()
    binding.bind_tensors({name: t.clone() for name, t in before.items()})
    assert next(job.model.parameters()) is p
    assert job.optimizer.param_groups[0]["params"][0] is p
    assert p.tag == "mine"  # type: ignore[attr-defined]
    assert not p.requires_grad
    assert p.grad is not None
    assert p.data_ptr() != before["0.weight"].data_ptr()
    assert binding.has_same_tensors(Binding(job.model, [job.optimizer], CPU))
    job.forward()
    job.backward()
    job.update()
    assert not binding.has_same_tensors(Binding(job.model, [job.optimizer], CPU)), "Adam remembers more now"


def test_tensors_that_the_model_replaces_are_moved_too() -> None:
    """A buffer that the model has replaced is copied into the memory that belongs to it."""
    job = Job(1)
    binding = Binding(job.model, [job.optimizer], CPU)
    home = {name: t.clone() for name, t in binding.named_tensors().items()}
    binding.bind_tensors(home)
    norm = job.model[1]  # type: ignore[index]
    norm.running_mean = torch.full((32,), 3.0)
    with torch.inference_mode():
        binding.rebind_replaced(home)
    assert norm.running_mean.data_ptr() == home["1.running_mean"].data_ptr()
    assert home["1.running_mean"].tolist() == [3.0] * 32


class Tied(nn.Module):
    """A module in which two layers share a weight and a buffer has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("mask", torch.ones(4))
        self.a.register_buffer("mask", self.mask)


def test_one_tensor_in_two_places_stays_one() -> None:
    model = Tied()
    binding = Binding(model, [], CPU)
    assert sorted(binding.named_tensors()) == [".mask", "a.bias", "a.weight", "b.bias"]
    binding.bind_tensors({name: t.clone() for name, t in binding.named_tensors().items()})
    assert model.b.weight is model.a.weight
    assert model.mask is model.a.mask


def parts_of_one(model: Tied) -> None:
    """Register a buffer that shares memory with another buffer."""
    model.register_buffer("part", model.mask[:2])


def hooked(model: Tied) -> None:
    """Register a gradient hook on a parameter."""
    model.a.bias.register_hook(lambda g: None)


def lazy(model: Tied) -> None:
    """Add a layer whose parameters are not initialized."""
    model.c = nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [(parts_of_one, "part and .mask share memory"), (hooked, "a.bias has hooks"), (lazy, "Uninitialized")],
)
def test_states_that_can_not_be_moved_are_refused(change: Any, says: str) -> None:
    model = Tied()
    change(model)
    with pytest.raises(PlanError, match=says):
        Binding(model, [], CPU).check()


def test_layout() -> None:
    """The views of a slab have the values and strides of the original tensors."""
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = {"a": torch.arange(3), "images": images, "none": torch.empty(0, 2), "one": torch.tensor(True)}
    layout = SlabLayout.from_tensors(tensors)
    assert layout.nbytes == 3 * SLAB_ALIGNMENT_BYTES
    views = layout.view_tensors(torch.zeros(layout.nbytes, dtype=torch.uint8))
    for name, tensor in tensors.items():
        views[name].copy_(tensor)
        assert torch.equal(views[name], tensor)
        assert views[name].stride() == tensor.stride()


def test_budgets() -> None:
    """States that exceed the budget of the device or of the host are refused."""
    with threads() as copier:
        with pytest.raises(PlanError, match="state a has 4096 bytes, the device's budget is 4000"):
            Swap[str](4000, copier, CPU).add("a", Plain(torch.zeros(1024)))
        swap = Swap[str](9000, copier, CPU, host_budget=13000)
        swap.add("a", Plain(torch.zeros(1024)))
        swap.add("b", Plain(torch.zeros(1024)))
        with pytest.raises(PlanError, match="2 states have 8192 of the host's budget of 13000"):
            swap.add("c", Plain(torch.ones(2048)))
        with swap.lease_state("a"), swap.lease_state("b"), pytest.raises(PlanError, match="can't be dropped"):
            swap.discard_state("a")
        swap.discard_state("a")
        swap.add("c", there := Plain(torch.ones(2048)))  # a state of another size takes the place of both
        with swap.lease_state("c"):
            assert float(there.x.sum()) == 2048
            assert swap.resident_keys == {"c"}
            assert not swap.has_room("b")


def test_failed_copy_is_reported() -> None:
    """If a copy fails, the current wait and all later copies raise an error."""
    with threads() as copier:
        ticket = copier.copy("in", torch.zeros(3), torch.zeros(4))
        with pytest.raises(RuntimeError, match="a copy between host and device failed"):
            copier.wait(ticket)
        with pytest.raises(RuntimeError, match="a copy between host and device failed"):
            copier.copy("in", torch.zeros(3), torch.zeros(3))


def test_a_throttled_copier_takes_its_time() -> None:
    with threads(1e6) as copier:
        slab = torch.zeros(20_000, dtype=torch.uint8)
        waited = copier.order_after(copier.copy("in", slab, slab.clone()))
        assert waited > 15 * MILLI
        assert copier.bandwidth is not None
        assert copier.bandwidth < 1.01e6
