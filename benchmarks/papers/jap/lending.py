"""BPipe executed (Kim et al. 2023): early stages of 1F1B lend activations to late ones, and fetch them before backward.

Inside of `lending`, forwards of this process save their tensors in parcels. Of S stages, stage s, counted from 0, lends
to stage S - 1 - s what it would hold above the mean; see `single.bpipe` for the rule. What autograd saves travels,
weights and the stage's own input and output stay. Copies run on gloo's threads, beside the computation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.papers.jap.single import most_held
from lightning_pipes.engine.compute.executor import Executor
from lightning_pipes.ir import Kind

_ASK, _OUT, _BACK = 1, 2, 3
"""Tags of messages: bytes that come next, or 0 for what was lent first, or -1 for the end; a parcel; and one back."""


class Parcel:
    """What one forward saves for its backward.

    Args:
        weights: addresses of memory that stays.
    """

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._tensors: list[torch.Tensor] = []
        self._places: dict[tuple[Any, ...], int] = {}
        self._specs: list[torch.Tensor] = []  # on "meta": shapes and strides
        self._slab: torch.Tensor | None = None
        self._coming: Any = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | int:
        """Return the number of a saved tensor; a weight itself."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._weights or not tensor.numel():
            return tensor
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._places:
            self._places[place] = len(self._tensors)
            self._tensors.append(tensor.detach())
        return self._places[place]

    def unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        """Return a saved tensor, once it is back."""
        if isinstance(packed, torch.Tensor):
            return packed
        if self._coming is not None:
            self._coming.wait()
            self._rebuild()
        return self._tensors[packed]

    def take_bytes(self) -> torch.Tensor:
        """Return all tensors as bytes; the parcel has none any more."""
        self._specs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in self._tensors]
        first = torch.zeros(1, dtype=torch.uint8)  # so that no parcel is empty
        slab = torch.cat([first, *(t.contiguous().reshape(-1).view(torch.uint8) for t in self._tensors)])
        self._tensors = []
        return slab

    def expect_bytes(self, slab: torch.Tensor, work: Any) -> None:
        """Expect the bytes in `slab` when `work` has ended."""
        self._slab, self._coming = slab, work

    def _rebuild(self) -> None:
        assert self._slab is not None, "it was lent"
        ends = accumulate((spec.numel() * spec.element_size() for spec in self._specs), initial=1)
        for spec, (begin, end) in zip(self._specs, pairwise(ends), strict=True):
            values = self._slab[begin:end].clone().view(spec.dtype).view(spec.shape)
            self._tensors.append(torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype).copy_(values))
        self._slab = self._coming = None


class Lender:
    """Lends parcels of this rank to its partner, and keeps the partner's.

    Attributes:
        held: the most parcels of its own that were here at a time.
        kept: the most that were kept for the partner.
        lent: how many were lent.
    """

    def __init__(self, ranks: int) -> None:
        self.held = self.kept = self.lent = 0
        self._partner = ranks - 1 - dist.get_rank()
        pairs = [(low, ranks - 1 - low) for low in range(ranks // 2)]
        groups = {pair: dist.new_group(list(pair)) for pair in pairs}
        self._group = next((g for pair, g in groups.items() if dist.get_rank() in pair), None)
        self._here: list[tuple[Any, Parcel]] = []
        self._away: deque[tuple[Any, Parcel, int]] = deque()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        if self._group is not None:
            self._thread.start()

    def after_forward(self, key: Any, parcel: Parcel, stage: int, stages: int) -> None:
        """Hold one more parcel; lend it if there are too many."""
        self._here.append((key, parcel))
        self.held = max(self.held, len(self._here))
        if stages - stage > most_held(stages) and len(self._here) > most_held(stages) - 1:
            key, parcel = self._here.pop()
            slab = parcel.take_bytes()
            self._away.append((key, parcel, slab.numel()))
            self._send(torch.tensor([slab.numel()]), _ASK)
            self._send(slab, _OUT)
            self.lent += 1

    def after_backward(self, key: Any) -> None:
        """Forget a parcel, and fetch the one that was lent first."""
        self._here = [each for each in self._here if each[0] != key]
        if self._away:
            first, parcel, size = self._away.popleft()
            self._send(torch.tensor([0]), _ASK)
            slab = torch.empty(size, dtype=torch.uint8)
            parcel.expect_bytes(slab, dist.irecv(slab, self._partner, self._group, _BACK))
            self._here.append((first, parcel))

    def close(self) -> None:
        """End the partner's keeping, and wait for one's own end."""
        if self._group is not None:
            self._send(torch.tensor([-1]), _ASK)
            self._thread.join()
            for work, _ in self._sent:
                work.wait()

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        self._sent.append((dist.isend(tensor, self._partner, self._group, tag), tensor))
        while self._sent[0][0].is_completed() and len(self._sent) > 1:
            self._sent.popleft()

    def _keep(self) -> None:
        kept: deque[torch.Tensor] = deque()
        size = torch.zeros(1, dtype=torch.int64)
        while dist.recv(size, self._partner, self._group, _ASK) is not None and size >= 0:
            if size:
                kept.append(torch.empty(int(size), dtype=torch.uint8))
                dist.recv(kept[-1], self._partner, self._group, _OUT)
                self.kept = max(self.kept, len(kept))
            else:
                dist.send(kept.popleft(), self._partner, self._group, _BACK)


@contextmanager
def lending(ranks: int) -> Iterator[Lender]:
    """Have all trainings of the block lend activations as BPipe does. Collective."""
    lender, forward, compute = Lender(ranks), Executor._forward, Executor._compute

    def forward_into_parcel(self: Executor, i: Any, item: Any) -> None:
        if not item.training:
            return forward(self, i, item)
        stage = self._stages[i.stage, i.job]
        weights = {p.untyped_storage().data_ptr() for layer in stage.layers.values() for p in layer.parameters()}
        parcel = Parcel(weights)
        with torch.autograd.graph.saved_tensors_hooks(parcel.pack, parcel.unpack):
            forward(self, i, item)
        return lender.after_forward((id(self), i.batch, i.span), parcel, i.stage, self.plan.n_stages)

    def compute_and_fetch(self: Executor, i: Any, item: Any, span: Any) -> None:
        compute(self, i, item, span)
        if i.kind is Kind.B:
            lender.after_backward((id(self), i.batch, i.span))

    Executor._forward, Executor._compute = forward_into_parcel, compute_and_fetch  # type: ignore[method-assign]
    try:
        yield lender
    finally:
        Executor._forward, Executor._compute = forward, compute  # type: ignore[method-assign]
        dist.barrier()
        lender.close()
