"""Layers of one model and weight versions are swapped on a device by the same objects as siblings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_pipes import MemorySwap
from lightning_pipes.engine.compute.weights import WeightVersion, WeightVersions
from lightning_pipes.engine.residency.binding import Binding
from lightning_pipes.engine.residency.copier import ThreadCopier
from lightning_pipes.engine.residency.swap import Swap
from lightning_pipes.ir import PipelineError, PlanError
from tests.sim.lease_order import LeaseOrder

CPU = torch.device("cpu")
WIDTH, DEPTH, BATCHES = 24, 6, 7
LAYER = 3 * 4 * (WIDTH * WIDTH + WIDTH)
"""The bytes of a layer, with two moments of each weight. Other tensors are small."""


@contextmanager
def swapping(budget: int, slots: int | None = None) -> Iterator[Swap[Hashable]]:
    """Yield a swap that fills evicted states with NaN, and close it afterwards."""
    swap: Swap[Hashable] = Swap(budget, ThreadCopier(), CPU, slots=slots, poison=True)
    try:
        yield swap
    finally:
        swap.close()


def model() -> tuple[list[nn.Module], list[Optimizer]]:
    """Return layers, and optimizers that already have their states."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    optimizers: list[Optimizer] = [torch.optim.Adam(layer.parameters(), lr=0.01) for layer in layers]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layers, optimizers


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(BATCHES)]


def weights(layers: list[nn.Module]) -> list[torch.Tensor]:
    """Return copies of all parameters."""
    return [p.detach().clone() for layer in layers for p in layer.parameters()]


@dataclass
class Layers:
    """A training that runs layer by layer and repeats the forward of each layer before its backward.

    With `swap`, each layer is on the device only while it runs.
    """

    swap: Swap[Hashable] | None = None
    layers: list[nn.Module] = field(default_factory=list)
    leases: LeaseOrder | None = None

    def order(self) -> list[int]:
        """Return the layers that a batch uses, in order."""
        return [*range(DEPTH), *reversed(range(DEPTH))]

    @contextmanager
    def on_device(self, number: int, write: bool) -> Iterator[None]:
        if self.swap is None or self.leases is None:
            yield
            return
        with self.swap.lease_state(self.leases.begin_next(), write):
            yield
        self.swap.prefetch_states()

    def run(self) -> list[torch.Tensor]:
        self.layers, optimizers = model()
        if self.swap is not None:
            for number, (layer, optimizer) in enumerate(zip(self.layers, optimizers, strict=True)):
                self.swap.add(("layer", number), Binding(layer, [optimizer], CPU))
            self.leases = LeaseOrder(self.swap)
        for x in inputs():
            if self.leases is not None:
                self.leases.extend(("layer", number) for number in self.order())
            entered: list[torch.Tensor] = []
            for number in range(DEPTH):
                entered.append(x)
                with self.on_device(number, write=False), torch.no_grad():
                    x = self.layers[number](x)
            gradient = torch.ones_like(x)
            for number in reversed(range(DEPTH)):
                with self.on_device(number, write=True):
                    leaf = entered[number].clone().requires_grad_()
                    self.layers[number](leaf).backward(gradient)
                    optimizers[number].step()
                    optimizers[number].zero_grad()
                    assert leaf.grad is not None
                    gradient = leaf.grad
        if self.swap is not None:
            for number in range(DEPTH):
                self.swap.remove(("layer", number))
        return weights(self.layers)


@pytest.mark.parametrize("most", [2, 3, DEPTH])
def test_layers_of_one_model(most: int) -> None:
    """With room for only some layers on the device, the weights are the same bit by bit as without swapping."""
    wanted = Layers().run()
    with swapping(most * (LAYER + 4096)) as swap:
        got = Layers(swap).run()
        found = swap.statistics
        assert all(map(torch.equal, got, wanted))
        assert found.hits + found.late + found.misses == 2 * DEPTH * BATCHES
        assert found.bytes_in >= DEPTH * LAYER
        if most < DEPTH:
            assert found.bytes_in > BATCHES * DEPTH * LAYER // 2
        assert not swap.resident_keys


AGO = 2
"""The number of batches by which a backward follows its forward."""


@dataclass
class Versions:
    """An asynchronous training in which each backward uses the weight version of its forward.

    The backward repeats the forward with this version, which is older than the live weights by then. The batches before
    the first update share a version.
    """

    swap: Swap[Hashable] | None = None
    most: int = 0

    def run(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers: dict[int, nn.Module] = {n: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for n in range(2)}
        live = nn.ModuleList(layers.values())
        optimizer = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
        versions = WeightVersions(layers, max_versions=AGO + 1)
        waiting: list[tuple[int, torch.Tensor, WeightVersion]] = []
        for batch, x in enumerate(inputs()):
            version, number = versions.current_version(), max(0, batch - AGO)
            assert version is not None
            if self.swap is not None and ("version", number) not in self.swap:
                self.swap.add(("version", number), version.bind_to(CPU))
            with self.on_device(number), torch.no_grad():
                self.forward(layers, version, x)
            waiting.append((number, x, version))
            self.most = max(self.most, len({n for n, *_ in waiting}))
            if len(waiting) > AGO:
                number, *rest = waiting.pop(0)
                self.back(layers, versions, optimizer, number, *rest)
                if self.swap is not None and number not in {n for n, *_ in waiting}:
                    self.swap.remove(("version", number))
        for each in waiting:
            self.back(layers, versions, optimizer, *each)
        return [p.detach().clone() for p in live.parameters()]

    def back(
        self,
        layers: dict[int, nn.Module],
        versions: WeightVersions,
        optimizer: Optimizer,
        number: int,
        x: torch.Tensor,
        version: WeightVersion,
    ) -> None:
        if self.swap is not None:
            self.swap.predict([("version", number), ("version", number + 1)])
        with self.on_device(number):
            self.forward(layers, version, x).square().mean().backward()
            versions.collect_gradients([version])
        optimizer.step()
        optimizer.zero_grad()
        versions.after_update()

    def forward(self, layers: dict[int, nn.Module], version: WeightVersion, x: torch.Tensor) -> torch.Tensor:
        for number, layer in layers.items():
            x = functional_call(layer, dict(version.parameters[number]), (x,))
        return x

    @contextmanager
    def on_device(self, number: int) -> Iterator[None]:
        if self.swap is None:
            yield
            return
        with self.swap.lease_state(("version", number)):  # versions are not changed, so none is copied back
            yield
        self.swap.prefetch_states()


@pytest.mark.parametrize("slots", [1, 2, AGO + 1])
def test_weight_versions(slots: int) -> None:
    """With swapped weight versions, the weights are the same bit by bit as without swapping."""
    wanted = Versions().run()
    with swapping(1 << 20, slots) as swap:
        versions = Versions(swap)
        got = versions.run()
        assert versions.most == AGO + 1
        assert all(map(torch.equal, got, wanted))
        found = swap.statistics
        assert found.bytes_out == 0
        size, made = 2 * 4 * (WIDTH * WIDTH + WIDTH), BATCHES - AGO
        assert found.bytes_in >= made * size
        if slots == 1:  # other versions use the slot between the forward and backward of each version
            assert found.bytes_in >= 2 * (made - 1) * size


def test_a_callback_serves_siblings_layers_and_versions_at_once() -> None:
    """One `MemorySwap` swaps siblings, layers and weight versions together, without changing their values."""
    memory = MemorySwap(3 * (LAYER + 4096))
    memory._poison = True
    memory.open(several=True)
    swap = memory.states(CPU)
    siblings, optimizers = model()
    for index, (module, optimizer) in enumerate(zip(siblings[:3], optimizers[:3], strict=True)):
        memory.begin_turn(index)
        memory.end_turn(index, module, [optimizer], CPU)
    before = weights(siblings[:3])
    assert all(map(torch.equal, Layers(swap).run(), Layers().run()))
    versions = WeightVersions({0: nn.Linear(WIDTH, WIDTH)}, max_versions=2)
    version = versions.current_version()
    assert version is not None
    swap.add("version", version.bind_to(CPU))
    with swap.lease_state("version"):
        assert memory.has_room(0)
    assert memory.statistics is swap.statistics
    for index in range(3):
        memory.begin_turn(index)
        memory.end_turn(index, siblings[index], [optimizers[index]], CPU)
        memory.release_sibling(index)
    assert all(map(torch.equal, weights(siblings[:3]), before))
    memory.close()
    assert memory.states(CPU) is not swap
    memory.close()


def test_tensors_of_a_graph_stay() -> None:
    """A state that an autograd graph still refers to cannot be evicted."""
    with swapping(1 << 20, slots=1) as swap:
        layers, optimizers = model()
        for number in range(2):
            swap.add(number, Binding(layers[number], [optimizers[number]], CPU))
        with swap.lease_state(0):
            out = layers[0](torch.ones(1, WIDTH, requires_grad=True))
        with pytest.raises(PipelineError, match="a graph still refers to it"):
            swap.acquire(1)
        assert out.requires_grad


def test_states_that_do_not_fit_change_nothing() -> None:
    """If a state is refused because of its size, the swap and the tensors of the layer do not change."""

    def too_large(size: int) -> None:
        raise PlanError(f"{size} bytes are too many")

    with swapping(1 << 20) as swap:
        layers, optimizers = model()
        storage = [p.data_ptr() for p in layers[0].parameters()]
        with pytest.raises(PlanError, match="bytes are too many"):
            swap.add("a", Binding(layers[0], [optimizers[0]], CPU), too_large)
        assert "a" not in swap
        assert swap.host_bytes == 0
        assert [p.data_ptr() for p in layers[0].parameters()] == storage
        swap.add("a", Binding(layers[0], [optimizers[0]], CPU))
        assert "a" in swap
        assert not swap.is_leased("a")
        with swap.lease_state("a"):
            assert swap.is_leased("a")
        swap.remove("a")
        swap.remove("a")  # a second call does nothing
        assert swap.bound_tensors("a") is None
