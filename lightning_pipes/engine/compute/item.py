"""One batch of one job in the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_pipes.ir import LayerUse


@dataclass(eq=False)
class Item:
    """One batch of one job, as one rank sees it.

    Attributes:
        number: counts the job's batches since training began, so that random numbers repeat after a resume.
        rows: samples in this batch; fewer than the plan's where the last batch is short.
        data: data for the bodies of this rank's stages; the engine does not read it.
        job: the sibling it belongs to.
        training: forward and backward, or forward only without gradients.
        use: the layers that it uses, and those of them that it steps; None means all.
    """

    number: int
    rows: int
    data: Any = None
    job: int = 0
    training: bool = True
    use: LayerUse | None = None
