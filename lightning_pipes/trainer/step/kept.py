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
        left_out: why nothing is kept.
    """

    batch: Any
    rows: int
    parts: dict[Span, Any] = field(default_factory=dict)
    inside: bool = False
    left_out: str = ""

    def keep(self, span: Span, received: Any, output: Any) -> None:
        """Copies of what is needed of one micro-batch."""
        if self.left_out:
            return
        trained = [t for t in tensors_in(output) if t.requires_grad]  # a mask without samples is no loss
        self.inside = self.inside or not all(t.ndim and t.size(0) == span.rows for t in trained)
        part = received if self.inside else output
        needed = sum(t.nbytes for t in tensors_in(part)) * self.rows // span.rows
        self.left_out = no_room(needed)
        if self.left_out:
            self.parts.clear()
            return
        self.parts[span] = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(HOST, copy=True), part)


def no_room(needed: int) -> str:
    """Why so many bytes should not be taken on this host; empty if they can."""
    available = psutil.virtual_memory().available
    if needed <= available // 4:
        return ""
    return f"the whole batch takes about {needed / 2**30:.1f} GiB at once, and {available / 2**30:.1f} GiB are free"
