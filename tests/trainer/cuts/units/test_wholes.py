"""Tests of modules that one stage runs as a whole, with all that surrounds their forward, on two processes.

These are compiled modules, and modules with backward hooks or with a checkpoint of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as apply_checkpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import WIDTH, data, differences, plain_values, quiet
from tests.trainers import make_trainer

BLOCKS, BATCHES = 6, 4
COMPILED: list[int] = []
"""The number of operations of each graph that was compiled in this process."""


class Block(nn.Module):
    """A residual block that has submodules."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Net(pl.LightningModule):
    """A module whose blocks are changed before training begins.

    Args:
        change: changes the blocks.
        dropout: the rate of dropout in the blocks.
    """

    def __init__(self, change: Callable[[nn.ModuleList], None], dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        change(self.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_compilation(graph: Any, inputs: Any) -> Any:
    """Compile nothing, but note the call."""
    COMPILED.append(len(graph.graph.nodes))
    return graph.forward


def compile_blocks(blocks: nn.ModuleList) -> None:
    for n, block in enumerate(blocks):
        if n % 2:
            blocks[n] = torch.compile(block, backend=count_compilation)
        else:
            block.compile(backend=count_compilation)


def hook_blocks(blocks: nn.ModuleList) -> None:
    """Change the gradients of blocks at both sides of the border, and of a layer in a block."""
    for n in (0, 2, 3, 5):
        blocks[n].register_full_backward_hook(halve)
    blocks[3].register_full_backward_pre_hook(lambda module, after: (after[0] * 0.9,))
    blocks[4].up.register_full_backward_hook(halve)


def halve(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in before)


def keep_blocks(blocks: nn.ModuleList) -> None:
    for n in (1, 2, 3):
        apply_checkpoint(blocks[n])


CHANGES = {"compiled": compile_blocks, "backward hooks": hook_blocks, "checkpoints": keep_blocks}


def fit(net: Net, strategy: Any, devices: int, batches: int = BATCHES) -> dict[str, Any]:
    """Train and return the weights and metrics."""
    net.double()
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=1)
    trainer.fit(net, DataLoader(data(8 * batches), batch_size=8))
    values: dict[str, Any] = plain_values({**net.state_dict(), **trainer.callback_metrics})
    return values


def make(change: Callable[[nn.ModuleList], None], dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(change, dropout)


def fit_all(rank: int) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]]:
    """Return the results of each change, without dropout and with it at two borders, and what was compiled."""
    quiet()
    found = []
    for change in CHANGES.values():
        COMPILED.clear()
        options = {"module": "", "partition": "parameters", "check_loss": False}  # a check would run whole batches
        plain = fit(make(change), PipelineStrategy("1f1b", microbatches=4, **options), 2)
        count = len(COMPILED)
        drawn = [
            fit(make(change, 0.3), PipelineStrategy("1f1b", microbatches=2, partition=[name], verify=2), 2, 2)
            for name in ("blocks.2", "blocks.4")
        ]
        found.append((plain, *drawn, count))
    return found


def test_wholes_are_one_process() -> None:
    """Compare weights with one process, and check with `verify` that random numbers do not depend on the border.

    Blocks are compiled at most once, so their guards hold although the weights of stages take turns with stand-ins.
    """
    ranks = run_ranks(fit_all, 2, timeout=240)
    for (name, change), *of_ranks in zip(CHANGES.items(), *ranks, strict=True):
        expected = fit(make(change), "auto", 1)
        for plain, one, other, _ in of_ranks:
            assert differences(expected, plain, 1e-10, name) == []
            assert differences(one, other, 0.0, f"{name} with dropout") == []
        if change is compile_blocks:
            assert all(0 < count <= BLOCKS for *_, count in of_ranks)


def refuse(rank: int) -> list[str]:
    """Return the errors for a large module that must be run as a whole, and for a border in such a module."""
    found = []
    for change, settings, _ in REFUSED:
        with pytest.raises(PipelineError) as error:
            fit(make(change), PipelineStrategy(module="", **settings), 2)
        found.append(str(error.value))
    return found


REFUSED: list[tuple[Callable[[nn.ModuleList], None], dict[str, Any], str]] = [
    (hook_blocks, {"partition": ["blocks.3.down"]}, "one stage runs 'blocks.3' as a whole"),
]


def test_wholes_that_borders_divide_are_refused() -> None:
    for found in run_ranks(refuse, 2, timeout=120):
        for (_, _, part), text in zip(REFUSED, found, strict=True):
            assert part in text
