"""Sums gradients whose parts are on several ranks. They are flattened into buckets during backward.

A bucket also contains one mark for each parameter. If a parameter has no gradient on any rank, its gradient remains
None, so that its optimizer state and weight decay stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lightning_pipes.cost.deployment import BUCKET_BYTES
from lightning_pipes.engine.residency.deliveries import NeedSource
from lightning_pipes.engine.residency.mirrors import PendingTree, TreeTransport
from lightning_pipes.ir import PipelineError, Reduction

Tensor = TypeVar("Tensor", bound=torch.Tensor)
Wait = Callable[[], object]
AllReduce = Callable[[torch.Tensor], Wait]
"""Starts to sum a tensor in place over some ranks, and returns a function that waits for the end."""


def is_distributed(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, which may have parts on several ranks."""
    return hasattr(tensor, "to_local")  # importing its class takes long


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank, without a graph. Writing to it changes the tensor."""
    part: Any = tensor.detach()
    return cast(torch.Tensor, part.to_local()) if is_distributed(part) else part


def complete_gradient(parameter: Any) -> None:
    """Redistribute a gradient to the placements of its parameter, which sums the parts of tensor-parallel ranks.

    For a distributed parameter, this is a collective call on its mesh.
    """
    gradient: Any = parameter.grad
    if gradient is not None and is_distributed(parameter) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


class Bucket:
    """Gradients of one dtype that are reduced together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._flat: torch.Tensor | None = None
        self._wait: Wait = lambda: None

    def start(self, all_reduce: AllReduce) -> None:
        """Start to reduce the current gradients. Types of less than four bytes are summed in float32.

        Raises:
            PipelineError: a gradient is sparse.
        """
        for p in self.parameters:
            _check_dense(p.grad)
        for p in self.parameters:
            complete_gradient(p)
        parts = [local_part(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        marks = torch.tensor([float(p.grad is not None) for p in self.parameters])
        flat = torch.cat([*parts, marks.to(parts[0])])
        self._flat = flat.float() if flat.dtype.itemsize < 4 else flat
        self._wait = all_reduce(self._flat)

    def finish(self, divisor: int = 1) -> None:
        """Wait for the sums over the ranks, and replace each gradient by its sum divided by `divisor`.

        A gradient that is None on all ranks stays None.
        """
        self._wait()
        assert self._flat is not None, "start was not called"
        sizes = [local_part(p).numel() for p in self.parameters]
        *sums, marks = torch.split(self._flat, [*sizes, len(sizes)])
        for p, part, mark in zip(self.parameters, sums, marks.tolist(), strict=True):
            if mark:
                mean = (part if divisor == 1 else part / divisor).to(p.dtype)
                if is_distributed(p):
                    p.grad = torch.empty_like(p)
                    local_part(p.grad).copy_(mean.view_as(local_part(p)))
                else:
                    p.grad = mean.view_as(p)
        self._flat, self._wait = None, lambda: None


class TrainableParameters:
    """The parameters that were trainable at least once, because hooks may freeze and unfreeze parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._known: set[int] = set()
        self.add_trainable()

    def add_trainable(self) -> bool:
        """Add the parameters that are trainable now, and return whether any of them is new."""
        before = len(self._known)
        self._known.update(id(p) for p in self._parameters if p.requires_grad)
        return len(self._known) > before

    def is_known(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter was trainable at least once."""
        return id(parameter) in self._known


def make_buckets(parameters: Iterable[nn.Parameter], size: int = BUCKET_BYTES) -> list[Bucket]:
    """Return the parameters in buckets of about `size` bytes.

    The last parameters are in the first bucket, because backward reaches them first.
    """
    return [Bucket(group) for group in group_by_bytes(reversed(list(parameters)), size)]


def group_by_bytes(tensors: Iterable[Tensor], size: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield the tensors in groups of about `size` bytes, each of one dtype and device, in their order."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        groups.setdefault(key, []).append(tensor)
        filled[key] = filled.get(key, 0) + tensor.numel() * tensor.element_size()
        if filled[key] >= size:
            yield groups[key]
            groups[key], filled[key] = [], 0
    yield from (group for group in groups.values() if group)


class Reducer:
    """Averages the gradients of this rank's stages over the replicas of the pipeline.

    In the last backward of a batch on a stage, a bucket is sent as soon as its gradients are complete. Buckets are
    always sent in the same order, so that the replicas agree. The rest of this backward, and the backwards of other
    stages and ranks, continue in the meantime.

    Args:
        parameters: the parameters of each stage, in the order of its layers.
        all_reduce: sums a tensor over the ranks that hold the same stage in all replicas.
        replicas: the number of replicas.
        size: the bytes of a bucket.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        all_reduce: AllReduce,
        replicas: int,
        size: int = BUCKET_BYTES,
    ) -> None:
        self._parameters = {stage: tuple(found) for stage, found in parameters.items()}
        self._trained = TrainableParameters(p for found in self._parameters.values() for p in found)
        self._size = size
        self._all_reduce = all_reduce
        self._replicas = replicas
        self._in_flight: list[Bucket] = []
        self._started = 0
        self._waiting: list[tuple[Bucket, set[int]]] = []
        """The buckets of the stage in its last backward, in order, each with the ids of its incomplete parameters."""
        self._hooks: list[Any] = []
        self._fill()

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """Start to reduce gradients inside the block, in which a backward completes the gradients of a batch on a
        stage.

        Raises:
            PipelineError: a gradient is sparse, or is accumulated in several parts.
        """
        if self._trained.add_trainable():
            self.remove()
            self._fill()
        self._started = 0
        self._waiting = [(bucket, {id(p) for p in bucket.parameters}) for bucket in self._buckets[stage]]
        try:
            yield
            self._start(len(self._waiting))
        finally:
            self._waiting = []

    def finish(self) -> None:
        """Wait for all buckets, and replace each gradient by its average over the replicas."""
        for bucket in self._in_flight:
            bucket.finish(self._replicas)
        self._in_flight = []

    def is_own_hook(self, hook: Callable[..., object]) -> bool:
        """Return whether a hook on a parameter belongs to this reducer."""
        return getattr(hook, "__self__", None) is self

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _fill(self) -> None:
        trained = {stage: [*filter(self._trained.is_known, found)] for stage, found in self._parameters.items()}
        self._buckets = {stage: make_buckets(found, self._size) for stage, found in trained.items()}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]
            for found in trained.values()
            for p in found
            if p.requires_grad
        ]

    def _complete(self, parameter: torch.Tensor) -> None:
        for number, (bucket, missing) in enumerate(self._waiting):
            if id(parameter) in missing:
                missing.remove(id(parameter))
            elif number < self._started and any(parameter is p for p in bucket.parameters):
                raise PipelineError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} comes in several parts within one "
                    "backward, as with reentrant checkpointing of a layer that is used twice; "
                    "use torch.utils.checkpoint with use_reentrant=False, or recompute=True"
                )
        ready = self._started
        while ready < len(self._waiting) and not self._waiting[ready][1]:
            ready += 1
        self._start(ready)

    def _start(self, until: int) -> None:
        for bucket, _ in self._waiting[self._started : until]:
            bucket.start(self._all_reduce)
            self._in_flight.append(bucket)
        self._started = max(self._started, until)


class ReplicaAverages(NeedSource):
    """Averages gradients over replicas batch by batch, if batches overlap.

    Each replica runs batches in its own order, so collective calls would not match. Instead, each rank sends its part
    of a batch's gradients to the same stage in the other replicas, and steps the batch when it has received all parts.
    No rank blocks, and the oldest batch does not wait for any other batch, so that a deadlock is not possible. Parts
    are always summed in the order of the replicas. The buffers of the layers that a batch steps are set to the values
    of the first replica, as in torch's DistributedDataParallel.

    Args:
        transport: sends to the ranks with the same stages, which are numbered by replica.
        replica: the number of this replica.
        replicas: the number of replicas.
    """

    def __init__(self, transport: TreeTransport, replica: int, replicas: int) -> None:
        self._transport, self._replica, self._replicas = transport, replica, replicas
        self._expected: dict[Reduction, tuple[tuple[int, int], dict[int, PendingTree]]] = {}
        self._parts: dict[tuple[int, int], dict[int, Any]] = {}  # by stage and batch number, then by replica
        self._has_arrivals = False

    @property
    def n_expected(self) -> int:
        return len(self._expected)

    @property
    def expected_text(self) -> str:
        return f"the gradients of {self.n_expected} batches"

    def step_needs(self, batch: int, stage: int) -> tuple[Reduction, ...]:
        return (Reduction(stage, batch),)

    def expect(self, reduction: Reduction, number: int, notify: Callable[[], None]) -> None:
        """Expect the parts of a batch on a stage of this rank.

        Args:
            reduction: the sum, by stage and batch in the window.
            number: the number of the batch since training began, which is the same in all replicas.
            notify: called on any thread when a part arrives.
        """

        def on_arrival() -> None:
            self._has_arrivals = True
            notify()

        others = (replica for replica in range(self._replicas) if replica != self._replica)
        key = reduction.stage, number
        parts = {each: self._transport.receive(each, key, on_arrival) for each in others}
        self._expected[reduction] = key, parts

    def take_arrived(self) -> list[Reduction]:
        """Return the sums that became complete since the last call, because all their parts have arrived."""
        if not self._has_arrivals:
            return []
        self._has_arrivals = False
        found = [each for each, (_, parts) in self._expected.items() if all(p.is_done() for p in parts.values())]
        for each in found:
            key, parts = self._expected.pop(each)
            self._parts[key] = {replica: part.content for replica, part in parts.items()}
        return found

    def send(
        self,
        stage: int,
        number: int,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor | None],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Send the complete gradients of a batch on a stage to the other replicas.

        Args:
            stage: the number of the stage.
            number: the number of the batch since training began.
            names: the names of the layers that the batch steps.
            gradients: the gradients of the parameters of these layers.
            buffers: the buffers of these layers, which only the first replica sends.

        Raises:
            PipelineError: a gradient is sparse.
        """
        for gradient in gradients:
            _check_dense(gradient)
        part = [list(names), list(gradients), list(buffers) if self._replica == 0 else []]
        for replica in range(self._replicas):
            if replica != self._replica:
                self._transport.send(replica, (stage, number), part)

    def average(
        self,
        stage: int,
        number: int,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buffers: Iterable[torch.Tensor],
    ) -> None:
        """Replace the gradients of a batch on a stage by their averages over the replicas.

        A gradient that is None in all replicas stays None.

        Args:
            stage: the number of the stage.
            number: the number of the batch since training began.
            names: the names of the layers that the batch steps.
            parameters: the parameters of these layers.
            buffers: the buffers of these layers, which are set to the values of the first replica.

        Raises:
            PipelineError: the batch steps different layers in different replicas.
        """
        names = list(names)
        parts = self._parts.pop((stage, number))
        parts[self._replica] = [names, [p.grad for p in parameters], []]
        for replica, (said, _, _) in sorted(parts.items()):
            if said != names:
                raise PipelineError(
                    f"replicas train different layers of stage {stage} in batch {number}: "
                    f"{', '.join(names) or 'none'} in replica {self._replica}, and {', '.join(said) or 'none'} in "
                    f"replica {replica}. layers_of_batch must return the same layers in all replicas. Give explorers "
                    "and spaces the same seed"
                )
        with torch.no_grad():
            for n, p in enumerate(parameters):
                found = [parts[replica][1][n] for replica in sorted(parts)]
                given = [g.float() if g.dtype.itemsize < 4 else g for g in found if g is not None]
                if given:
                    total = given[0]
                    for gradient in given[1:]:
                        total = total + gradient
                    p.grad = (total / self._replicas).to(p.dtype)
            for buffer, first in zip(buffers, parts[0][2], strict=False):
                buffer.copy_(first)


def _check_dense(gradient: torch.Tensor | None) -> None:
    """Check that a gradient can be summed over ranks.

    Raises:
        PipelineError: the gradient is sparse.
    """
    if gradient is not None and gradient.layout is not torch.strided:
        raise PipelineError(
            f"A parameter of shape {tuple(gradient.shape)} is on several ranks, and its gradient is {gradient.layout}. "
            "Gradients that are summed over ranks must be dense. Use sparse=False, or make the module one of the "
            "layers that are cut, with data_parallel=1, so that one rank holds the parameter."
        )
