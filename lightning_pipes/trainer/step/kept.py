"""A batch kept from its first micro-batch to its last, to be looked at as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.footprint import tensors_in
from lightning_pipes.ir import Span

HOST = torch.device("cpu")


@dataclass
class Kept:
    """The first batch as it was loaded, and what the last stage had of each micro-batch; on the host.

    Attributes:
        inside: whether `parts` are what the last stage's layers got, for what they return has no samples: a loss.
        axis: the axis of what they return that counts samples; in `parts` it is the first one.
        left_out: why nothing is kept.
    """

    batch: Any
    rows: int
    parts: dict[Span, Any] = field(default_factory=dict)
    inside: bool = False
    axis: int = 0
    left_out: str = ""

    def keep(self, span: Span, received: Any, output: Any) -> None:
        """Copies of what is needed of one micro-batch."""
        if self.left_out:
            return
        trained = [t for t in tensors_in(output) if t.requires_grad]  # a mask without samples is no loss
        axes = range(self.axis, min((t.ndim for t in trained), default=1))
        axis = next((a for a in axes if all(t.size(a) == span.rows for t in trained)), None)
        if self.parts and axis != self.axis and not self.inside:
            self.left_out = "micro-batches leave the layers in other forms"
            return
        self.inside, self.axis = axis is None, axis or 0
        part = received if self.inside else output
        needed = sum(t.nbytes for t in tensors_in(part)) * self.rows // span.rows
        self.left_out = no_room(needed)
        if self.left_out:
            self.parts.clear()
            return
        self.parts[span] = pytree.tree_map_only(torch.Tensor, lambda t: self._with_samples_first(t.detach()), part)

    def given(self, part: Any) -> Any:
        """Return what `parts` have in the form in which it left the layers."""
        if not self.axis:
            return part
        return pytree.tree_map_only(
            torch.Tensor, lambda t: t.movedim(0, self.axis) if t.is_floating_point() and t.ndim > self.axis else t, part
        )

    def _with_samples_first(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.axis and tensor.is_floating_point() and tensor.ndim > self.axis
        return (tensor.movedim(self.axis, 0) if moved else tensor).to(HOST, copy=True)


def no_room(needed: int) -> str:
    """Why so many bytes should not be taken on this host; empty if they can."""
    available = psutil.virtual_memory().available
    if needed <= available // 4:
        return ""
    return f"the whole batch takes about {needed / 2**30:.1f} GiB at once, and {available / 2**30:.1f} GiB are free"
