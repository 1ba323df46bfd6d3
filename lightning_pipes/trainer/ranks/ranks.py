"""This rank and the others of its run, once they are connected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.grid import Grid


@dataclass(frozen=True)
class Ranks:
    """The ranks of a session: from `setup_environment` of a strategy until the next one.

    Attributes:
        grid: where this rank is among the replicas and stages.
        device: of this rank.
        control: collectives of all ranks.
        pipeline: collectives of the ranks of this rank's pipeline.
    """

    grid: Grid
    device: torch.device
    control: Control
    pipeline: Control
