"""Supernets of the compatibility table with different hooks, which run while subnets overlap (schedule "csp")."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_pipes.supernets import ChoiceBlock, SearchSpace, Subnet, SubnetStream, Supernet, Uniform
from tests.trainer.lit import WIDTH, data

BLOCKS, CANDIDATES, BATCHES = 6, 3, 9
SPACE = SearchSpace.from_sizes([CANDIDATES] * BLOCKS)


def subnet_loaders() -> dict[str, Any]:
    return {"train_dataloaders": stream().pair_with(DataLoader(data(8 * BATCHES), batch_size=8))}


def stream(seed: int = 1) -> SubnetStream:
    return SubnetStream(Uniform(SPACE, seed=seed))


class LitSupernet(pl.LightningModule):
    """An ordinary supernet. Each batch trains one candidate of each block."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            ChoiceBlock([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(CANDIDATES)])
            for _ in range(BLOCKS)
        )
        self.net = Supernet(*blocks, nn.Linear(WIDTH, 3), shared="per_choice")

    def layers_of_batch(self, batch: Any) -> Any:
        return self.net.layers_of(batch[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), subnet = batch
        return F.cross_entropy(self.net((x, subnet)), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8), "interval": "step"}]


class LeavesStepsOut(LitSupernet):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 3 == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class SetsRates(LitSupernet):
    """A supernet that sets the learning rate of each batch before its step, and clears gradients as usual."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class ZeroesGradients(LitSupernet):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ScalesGradients(LitSupernet):
    """A supernet that changes gradients in the hooks before the step, in place and by assignment."""

    def on_after_backward(self) -> None:
        for p in self.net.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.02)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, p in self.named_parameters():
            if p.grad is not None and name.endswith("bias"):
                p.grad = p.grad.sign() * 0.01 * len(name)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.015)


class ScalesInACallback(pl.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad.sign()


class ClampsWeights(LitSupernet):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.125, 0.125)


class ClampsData(LitSupernet):
    """A supernet that clamps its weights through `data`, as a Wasserstein GAN does."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.125, 0.125)


class ClampsBeforeSteps(LitSupernet):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                p.clamp_(-0.125, 0.125)


class ClampsAtEpochs(LitSupernet):
    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                p.clamp_(-0.125, 0.125)


class ClampsInTheOptimizer(LitSupernet):
    """A supernet that clamps its weights in a hook of the optimizer.

    The errors of the other supernets that clamp weights recommend this way.
    """

    def __init__(self) -> None:
        super().__init__()
        clamp(SGD(self.parameters()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        optimizer.register_step_post_hook(clamp)
        return optimizer


def clamp(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.125, 0.125)


class DecaysAll(LitSupernet):
    """A supernet with an optimizer that decays all weights, including weights that a batch does not use."""

    def configure_optimizers(self) -> Any:
        return DecayingSGD(self.parameters(), lr=0.1)


class DecayingSGD(SGD):
    """Decays all parameters, even those without gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return loss


class FreezesLater(LitSupernet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for candidate in (self.net[0][0], self.net[3][1], self.net[5][0], self.net[5][1]):
            candidate.requires_grad_(batch_idx < 3)


class FreezesAtEpochs(LitSupernet):
    def on_train_epoch_start(self) -> None:
        for block in (self.net[1], self.net[4]):
            block.requires_grad_(self.current_epoch != 0)


class LeavesOut(LitSupernet):
    """A supernet whose `layers_of_batch` omits a layer that its batches train."""

    def layers_of_batch(self, batch: Any) -> Any:
        found = self.net.layers_of(batch[-1])
        return {name: stepped for name, stepped in found.items() if not name.startswith("2.")}


class SaysNothing(LitSupernet):
    """A supernet without `layers_of_batch`."""

    layers_of_batch: Any = None


class DrawsByRank(LitSupernet):
    """A supernet that draws the subnet of a batch in its own code, and a different one on each rank."""

    def subnet(self, batch: Any) -> Subnet:
        return Subnet([(self.global_rank + batch[-1].id + n) % CANDIDATES for n in range(BLOCKS)], batch[-1].id)

    def layers_of_batch(self, batch: Any) -> Any:
        return self.net.layers_of(self.subnet(batch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), _ = batch
        return F.cross_entropy(self.net((x, self.subnet(batch))), y)


class StreamByRank(LitSupernet):
    """A supernet with a different stream of subnets on each rank."""

    def train_dataloader(self) -> Any:
        return stream(seed=self.global_rank).pair_with(DataLoader(data(8 * BATCHES), batch_size=8))


class CountsStates(LitSupernet):
    """A supernet that sets the learning rate from the number of weights that have an optimizer state."""

    def on_train_batch_end(self, *_: Any) -> None:
        (optimizer,) = self.trainer.optimizers
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + len(optimizer.state))


class CountsAtEpochs(LitSupernet):
    def on_train_epoch_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + len(optimizer.state))


class LooksForStates(LitSupernet):
    """A supernet that sets the learning rate from the number of a batch's weights that were stepped before."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        known = sum(p in optimizer.state for p in self.net.parameters() if p.grad is not None)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + known)


class DecaysStates(LitSupernet):
    """A supernet that halves the running averages of all weights between two batches."""

    def on_train_batch_end(self, *_: Any) -> None:
        (optimizer,) = self.trainer.optimizers
        for p in self.net.parameters():
            if not p.is_meta and p in optimizer.state:
                optimizer.state[p]["exp_avg"].mul_(0.5)


class DecaysOwnStates(LitSupernet):
    """A supernet that halves the running averages of the weights that a batch has trained, before their step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.is_meta and p.grad is not None and p in optimizer.state:
                    optimizer.state[p]["exp_avg"].mul_(0.5)


class NormOfGroups(LitSupernet):
    """A supernet that divides gradients by a norm that it computes over the optimizer's groups."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        every = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.pow(2).sum()) for p in every) ** 0.5
        for p in every:
            p.grad.div_(1 + total)


class AnnealsInHooks(LitSupernet):
    """A supernet whose hook sets, before each batch, values that the step and another hook read."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table, self.limit = 1.0, {"scale": 1.0}, [1.0]
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1.0 + batch_idx / 4
        self.table["scale"] = 1.0 + batch_idx / 8
        self.shift.add_(0.1)
        self.limit.append(0.001 * (batch_idx + 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), subnet = batch
        return F.cross_entropy(self.net((x * self.scale + self.shift, subnet)), y) * self.table["scale"] * self.scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.net.parameters():
            if p.grad is not None:
                p.grad.clamp_(-self.limit[-1], self.limit[-1])


class SetsBeforeSteps(LitSupernet):
    """A supernet whose hook before the step sets a value that the next batch reads."""

    scale = 1.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scale = self.scale * 0.9

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.scale


class LayersCount(LitSupernet):
    """A supernet whose candidates count their calls, and scale their outputs by the count."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (ChoiceBlock([Counting() for _ in range(CANDIDATES)]) for _ in range(BLOCKS))
        self.net = Supernet(*blocks, nn.Linear(WIDTH, 3), shared="per_choice")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x).tanh() * min(1.0, self.calls / 4)


class AveragesWeights(LitSupernet):
    """A supernet that averages its weights over batches, and replaces them by the averages at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.averages: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            before = self.averages.get(name)
            self.averages[name] = p.detach().clone() if before is None else 0.5 * before + 0.5 * p.detach()

    def on_train_end(self) -> None:
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(self.averages[name])


class CountsSteps(LitSupernet):
    """A supernet that sets a number before each batch, and reads a list of its steps at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self.number = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps.append(1.0 + self.number)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("steps", sum(self.steps))
        self.steps.clear()
