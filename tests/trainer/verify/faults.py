"""Faults that `verify` must find: trainings in which a pipeline differs from one process in a single respect.

In most faults, the user's code runs as intended only in one process (`alone`) or on the rank of the last stage
(`last`), as if the pipeline ignored it. In other faults, a part of the library is broken during the training. Without a
fault, both trainings are equal.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.compute import stage as stage_module
from lightning_pipes.engine.compute.rng import stream_seed
from lightning_pipes.supernets import ChoiceBlock, SubnetStream, Supernet, Uniform
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from lightning_pipes.trainer.cuts import steps
from lightning_pipes.trainer.cuts.layers import proxy
from lightning_pipes.trainer.loop import synchronous, watcher
from lightning_pipes.trainer.loop.between_steps import BetweenSteps
from lightning_pipes.trainer.loop.synchronous import FreshGradients
from lightning_pipes.trainer.optimizers.shared_parameters import SharedParameters
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.setup import prepare
from lightning_pipes.trainer.user.clipping import GradientAgreement
from lightning_pipes.trainer.watchers import same_batch
from lightning_pipes.trainer.watchers.same_batch import SameBatch
from tests.trainers import make_trainer

WIDTH, ROWS, BLOCKS = 6, 8, 6
RANKS = 2
FOUND, EQUAL = "differs from one plain process", "equal to one process"
_LEFT: dict[str, float] = {}
"""Values that code after the layers stores outside of the module, where the library does not look."""


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.gain = 1.0
        self.left = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.linear(self.drop(x)))) * self.gain
        self.left = float(h.detach().square().sum())
        return x + h


class Net(pl.LightningModule):
    """A module with layers between an inlet and an outlet. Faults override its methods."""

    dropout, norm = 0.0, False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.model = nn.Sequential(*(Block(self.dropout, self.norm) for _ in range(BLOCKS)))
        self.register_buffer("factor", torch.ones(()))
        self.scale = 1.0
        self.double()

    @property
    def alone(self) -> bool:
        """Whether the module runs in one plain process."""
        return self.trainer.world_size == 1

    @property
    def last(self) -> bool:
        """Whether the module runs in one plain process, or on the rank of the last stage."""
        return self.trainer.global_rank == 0

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def loss(self, h: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(h, y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        h = self.outlet(self.model(self.before(self.inlet(x))))
        loss = self.loss(h, y, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.outlet(self.model(self.before(self.inlet(batch[0])))), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Search(pl.LightningModule):
    """A supernet that trains one subnet per batch."""

    seed = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = [
            ChoiceBlock([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)])
            for _ in range(BLOCKS)
        ]
        self.net = Supernet(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3), shared="sequential").double()

    alone, last = Net.alone, Net.last

    def layers_of_batch(self, batch: Any) -> Any:
        return self.net.layers_of(batch[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), subnet = batch
        loss = F.cross_entropy(self.net((x, subnet)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


@dataclass(frozen=True)
class Fault:
    """A fault and the training in which it occurs.

    Attributes:
        name: the mistake that is made.
        kind: a function that returns the module to train.
        finds: a part of the sentence that names the fault.
        broken: a context in which the library is broken. Only the ranks of a pipeline enter it.
        strategy: settings of the strategy.
        trainer: settings of the Trainer.
    """

    name: str
    kind: Callable[[], pl.LightningModule]
    finds: str
    broken: Callable[[int], Any] = lambda rank: nullcontext()
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


FAULTS: list[Fault] = []


def fault(name: str, finds: str, *, base: type[pl.LightningModule] = Net, **settings: Any) -> Callable[[type], type]:
    """Return a decorator that adds a fault, with a class whose methods override the methods of `base`."""

    def add(methods: type) -> type:
        own = {key: value for key, value in vars(methods).items() if key not in ("__dict__", "__weakref__")}
        FAULTS.append(Fault(name, type(methods.__name__, (base,), own), finds, **settings))
        return methods

    return add


# ---- hooks that run on one rank only


def keeps_state(rank: int) -> Any:
    """Keep the module's state on the rank on which it was set."""
    return patched(ModuleState, "collect_changes", lambda self: [])


@fault("attribute set in on_train_epoch_end, read before the layers", "the input of layer 0", broken=keeps_state)
class _A1:
    def on_train_epoch_end(self: Any) -> None:
        if self.last:
            self.scale = 2.0


@fault("attribute of layers set in on_train_epoch_end", "the input of layer 1")
class _A2:
    def on_train_epoch_end(self: Any) -> None:
        if self.last:
            for layer in self.model:
                layer.gain = 2.0


@fault("attribute set in on_validation_epoch_end", "the input of layer 0", broken=keeps_state)
class _A3:
    def on_validation_epoch_end(self: Any) -> None:
        if self.last:
            self.scale = 1.5


@fault("attribute set in on_validation_batch_end", "the input of layer 0", broken=keeps_state)
class _A4:
    def on_validation_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.last:
            self.scale += 0.5


@fault("attribute from logged values", "the input of layer 0", broken=keeps_state)
class _A5:
    def on_train_epoch_end(self: Any) -> None:
        if self.last:
            self.scale = float(self.trainer.callback_metrics["loss"])


@fault("requires_grad_ in on_train_epoch_end", "frozen")
class _A6:
    def on_train_epoch_end(self: Any) -> None:
        if self.last:
            for layer in self.model:
                layer.linear.bias.requires_grad_(False)


@fault("forward hook registered in on_validation_epoch_end", "the input of layer 1")
class _A7:
    def on_validation_epoch_end(self: Any) -> None:
        if self.last:
            self.model[0].register_forward_hook(lambda module, args, out: out * 1.1)


# ---- modes


class Evaluated(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.model:
            layer.eval()


@contextmanager
def forgets_modes(rank: int) -> Iterator[None]:
    hold = proxy.StageProxy.hold_layers

    def broken(self: Any, local: Any) -> None:
        hold(self, local)
        for layer in self._modules.values():
            layer.train()

    proxy.StageProxy.hold_layers = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        proxy.StageProxy.hold_layers = hold  # type: ignore[method-assign]


@fault("layers in evaluation mode with dropout", "the mode of", base=Evaluated, broken=forgets_modes)
class _B1:
    dropout = 0.5


@fault("frozen BatchNorm that is trained", "the mode of", base=Evaluated, broken=forgets_modes)
class _B2:
    norm = True


@fault("BatchNorm by micro-batches", "the input of layer")
class _B3:
    norm = True


# ---- norms over one stage, and optimizer steps


def clip(parameters: Any, most: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(most / norm)


def own(module: Any) -> list[Any]:
    """Return the parameters that this rank holds."""
    groups = module.optimizers().optimizer.param_groups
    return [p for group in groups for p in group["params"] if not p.is_meta]


@fault("clipping in optimizer_step by the norm of one stage", "that the optimizer gets")
class _C1:
    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        clip(own(self), 0.1)
        optimizer.step()


@fault("norm over optimizer.param_groups in a hook", "that the optimizer gets")
class _C2:
    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        clip(own(self), 0.1)


class Normed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        clip(self.param_groups[0]["params"], 0.1)
        super().step()
        return loss


@fault(
    "optimizer with a norm over all weights",
    "the weight",
    broken=lambda rank: patched(prepare, "check_steps_apart", lambda *_: None),
)
class _C3:
    def configure_optimizers(self: Any) -> Any:
        return Normed(self.parameters(), lr=0.1)


@contextmanager
def patched(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


def local_norm(self: Any, optimizer: Any) -> torch.Tensor:
    return torch.stack(
        [p.grad.norm() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    ).norm()


@fault(
    "clipping by norm over one stage",
    "that the optimizer gets",
    broken=lambda rank: patched(GradientAgreement, "total_norm", local_norm),
    trainer={"gradient_clip_val": 0.1},
)
class _C4:
    pass


# ---- values that layers and steps leave behind


@fault("auxiliary loss that layers leave in an attribute", "the loss")
class _D1:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        layers = list(self.model) if self.alone else list(self.model)[BLOCKS // 2 :]
        return F.cross_entropy(h, y) + 1e-3 * sum(layer.left for layer in layers) / len(h)


@fault("auxiliary loss that only the gradient lacks", "after backward")
class _D2:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        weight = self.outlet.weight
        return F.cross_entropy(h, y) + (0.1 * (weight - weight.detach()).sum() if self.alone else 0.0)


@fault("forward hooks that collect activations", "the loss")
class _D3:
    def setup(self: Any, stage: str) -> None:
        self.collected: dict[int, float] = {}
        for number, layer in enumerate(self.model):
            layer.register_forward_hook(
                lambda m, a, out, n=number: self.collected.update({n: float(out.detach().sum())})
            )

    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        kept = self.collected if self.alone else {n: v for n, v in self.collected.items() if n >= BLOCKS // 2}
        return F.cross_entropy(h, y) * (1 + 1e-3 * sum(kept.values()) / len(h))


@fault("value left after the layers, read before them", "the input of layer 0")
class _D4:
    def before(self: Any, x: Any) -> Any:
        return x * _LEFT.get("scale", 1.0)

    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(h, y)
        _LEFT["scale"] = 1.0 + float(loss)
        return loss


@fault("buffer set after the layers, read before them", "the input of layer 0")
class _D5:
    def before(self: Any, x: Any) -> Any:
        return x * self.factor

    def on_train_batch_end(self: Any, *_: Any) -> None:
        if self.last:
            self.factor.fill_(0.5)


@fault("alias changed in place by a later layer", "the loss")
class _D6:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = self.inlet(x)
        kept = x.clone()
        h = self.model(x)
        if self.alone:
            kept.add_(1.0)
        return F.cross_entropy(self.outlet(h + kept), y)


# ---- code that depends on other samples


@fault("mean over samples before the layers", "the input of layer 0")
class _E1:
    def before(self: Any, x: Any) -> Any:
        return x - x.mean(0)


@fault("arange(len(x)) before the layers", "the input of layer 0")
class _E2:
    def before(self: Any, x: Any) -> Any:
        return x + torch.arange(len(x)).view(-1, 1)


@fault("sorted samples before the layers", "the input of layer 0")
class _E3:
    def before(self: Any, x: Any) -> Any:
        return x.sort(0).values


@fault("temperature by batch before the layers", "the input of layer 0")
class _E4:
    def before(self: Any, x: Any) -> Any:
        return x / x.detach().std()


@fault("branch that depends on one sample", "the input of layer 0")
class _E5:
    def before(self: Any, x: Any) -> Any:
        return x * 2 if float(x.detach()[0, 0]) > 0 else -x


@fault("loss that is not a mean over samples", "the loss", strategy={"loss": "microbatch"})
class _E6:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        return F.cross_entropy(h, y, reduction="none").square().mean().sqrt()


@fault("random number for the whole batch", "the input of layer 0")
class _E7:
    def before(self: Any, x: Any) -> Any:
        return x * torch.rand(())


@fault("returned number of samples", "returns as 'rows", strategy={"check_loss": False})
class _E8:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": Net.training_step(self, batch, batch_idx), "rows": len(batch[0])}


# ---- hooks of torch


@fault("backward hook on the container", "after backward")
class _F1:
    def on_train_start(self: Any) -> None:
        if self.alone:
            self.model.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.1,))


@fault("hook on a parameter that runs for each micro-batch", "after backward")
class _F2:
    def on_train_start(self: Any) -> None:
        shift = 0.01 if self.alone else 0.02
        self.inlet.weight.register_hook(lambda gradient: gradient + shift)


# ---- data


@fault(
    "batches that differ by rank later",
    "the batch that training_step receives",
    broken=lambda rank: unmarked(),
    trainer={"limit_train_batches": 4},
)
class _G1:
    def on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        self.loaded = getattr(self, "loaded", 0) + 1
        return (x, y) if self.last or self.loaded <= 3 else (x + 1e-3, y)


# ---- a broken library


@contextmanager
def shifted_streams(rank: int) -> Iterator[None]:
    seed = stream_seed if rank == 0 else (lambda *args: stream_seed(*args) + 1)
    with patched(stage_module, "stream_seed", seed):
        yield


@fault("random streams shifted on one rank", "the input of layer", broken=shifted_streams)
class _H1:
    dropout = 0.3


def scaled(factor: float, rank: int, where: int) -> Any:
    give_back = FreshGradients.give_back

    def broken(self: Any) -> None:
        give_back(self)
        if rank == where:
            self.scaled = True
            for parameter in reversed(PARAMETERS):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
                    break

    return patched(FreshGradients, "give_back", broken)


PARAMETERS: list[nn.Parameter] = []


class Remembered(Net):
    def configure_optimizers(self) -> Any:
        PARAMETERS[:] = [p for layer in self.model for p in layer.parameters()]
        return super().configure_optimizers()


@fault("one gradient scaled by 1.0001", "after backward", base=Remembered, broken=lambda rank: scaled(1.0001, rank, 0))
class _H2:
    pass


@fault(
    "gradients of shared parameters not summed",
    "after backward",
    broken=lambda rank: patched(SharedParameters, "sum_gradients", lambda self: None),
)
class _H3:
    pass


@contextmanager
def equal_weights_of_parts(rank: int) -> Iterator[None]:
    class Rows(watcher.TrainingStep):
        @property
        def divisor(self) -> int:  # type: ignore[override]
            return self._divisor * 2

        @divisor.setter
        def divisor(self, value: int) -> None:
            self._divisor = value

    with patched(synchronous, "TrainingStep", Rows):
        yield


@fault("loss divided by twice as much", "after backward", broken=equal_weights_of_parts)
class _H4:
    pass


@fault(
    "logs merged by the last micro-batch",
    "logged",
    broken=lambda rank: patched(steps, "merge", lambda calls, *_: list(calls[-1])),
)
class _H5:
    pass


@fault(
    "learning rate that one rank changes",
    "lr of optimizer 0",
    broken=lambda rank: patched(same_batch, "check_same_settings", lambda *_: None),
)
class _H6:
    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if not self.last:
            own_optimizer = self.optimizers().optimizer
            own_optimizer.param_groups[0]["lr"] = 0.11


@fault("weights changed after the step on one rank", "the weight")
class _H7:
    def on_train_batch_end(self: Any, *_: Any) -> None:
        if self.last:
            for parameter in own(self):
                parameter.data.clamp_(-0.2, 0.2)


@contextmanager
def drops_last_part(rank: int) -> Iterator[None]:
    part = steps.TrainingBatch.select_samples

    def broken(self: Any, span: Any) -> Any:
        x, y = part(self, span)
        return (x, y) if span.start == 0 else (x, torch.zeros_like(y))

    with patched(steps.TrainingBatch, "select_samples", broken):
        yield


@fault("labels of a micro-batch lost", "the loss", broken=drops_last_part)
class _H8:
    pass


@fault("gradients kept from the batch before", "after backward", trainer={"limit_train_batches": 3})
class _H9:
    def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.alone:
            optimizer.zero_grad()


@fault("weights that differ at the start", "the input of layer")
class _H10:
    def on_train_start(self: Any) -> None:
        if not self.last:
            self.model[0].linear.bias.data[0] += 1e-6


# ---- code of ordinary scripts that works as intended in one process only


@fault("value summed over the ranks of a pipeline", "the loss")
class _I1:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        ranks = 1 if self.alone else RANKS  # the sum that all_reduce would return if every stage called it
        return F.cross_entropy(h, y) * ranks


@fault("learning rate times the number of processes", "lr of optimizer 0")
class _I2:
    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


@fault(
    "batches divided by the number of processes",
    "the batch that training_step receives",
    broken=lambda rank: unmarked(),
)
class _I3:
    def on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        rows = torch.arange(ROWS) % (ROWS // self.trainer.world_size)
        return [values[rows] for values in batch]


@fault("messages without a graph", "after backward")
class _I4:
    def on_train_start(self: Any) -> None:
        if not self.alone:
            for layer in self.model[: BLOCKS // 2]:
                layer.register_forward_hook(lambda module, args, out: args[0] + (out - args[0]).detach())


@fault("weights that training_step changes, for each micro-batch", "the loss")
class _I5:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        _LEFT["factor"] = _LEFT.get("factor", 1.0) * 0.9
        return F.cross_entropy(h * _LEFT["factor"], y)


@fault("attribute of a tensor that is lost at a border", "the input of layer 4")
class _I6:
    def on_train_start(self: Any) -> None:
        if self.alone:
            self.model[BLOCKS // 2].register_forward_hook(lambda module, args, out: out * 1.5)


@fault("generator that steps draw from before and after the layers", "the input of layer 0")
class _I7:
    def before(self: Any, x: Any) -> Any:
        return x * DRAWS.random()

    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        return F.cross_entropy(h, y) * DRAWS.random()


DRAWS = random.Random(0)


class CoupledLater(torch.optim.SGD):
    """Steps each parameter separately in its first step, and couples them in later steps."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.steps += 1
        if self.steps > 1:
            clip(self.param_groups[0]["params"], 0.1)
        super().step()
        return loss


@fault(
    "optimizer that couples parameters in later steps",
    "batch 1 differs from one plain process. The first difference is in",
    broken=lambda rank: patched(prepare, "check_steps_apart", lambda *_: None),
)
class _I8:
    def configure_optimizers(self: Any) -> Any:
        return CoupledLater(self.parameters(), lr=0.1)


@fault("auxiliary value of one piece of a batch", "the loss")
class _I9:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        return F.cross_entropy(h, y) + (h if self.alone else h[:1]).square().mean()


@fault("value logged once for each micro-batch", "logged")
class _I10:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("rows", float(ROWS if self.alone else ROWS // 2), batch_size=1)
        return Net.training_step(self, batch, batch_idx)


@fault("numbers of samples that training_step returns", "returns as 'count", strategy={"check_loss": False})
class _I11:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": Net.training_step(self, batch, batch_idx), "count": ROWS if self.alone else ROWS // 2}


@fault("gradient of an auxiliary loss that a recomputed layer keeps", "after backward", strategy={"recompute": True})
class _I12:
    def loss(self: Any, h: Any, y: Any, batch_idx: int) -> Any:
        kept = h.square().mean()
        return F.cross_entropy(h, y) + (kept if self.alone else kept.detach())


# ---- single precision, in which a difference may be rounding


class Single(Net):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].float(), batch[1]]


@fault(
    "single precision: loss that is not a mean over samples", "the loss", base=Single, strategy={"loss": "microbatch"}
)
class _P1:
    loss = _E6.loss


@fault("single precision: clipping by the norm of one stage", "that the optimizer gets", base=Single)
class _P2:
    on_before_optimizer_step = _C2.on_before_optimizer_step


# ---- subnets

CSP: dict[str, Any] = {"base": Search, "strategy": {"schedule": "csp"}}


@fault("csp: steps that optimizer_step leaves out", "the optimizer gets", **CSP)
class _S1:
    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if not self.alone or batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


@fault("csp: zero_grad(set_to_none=False)", "the weight", **CSP)
class _S2:
    def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=not self.alone)


@fault("csp: gradients changed in on_after_backward", "after backward", **CSP)
class _S3:
    def on_after_backward(self: Any) -> None:
        if self.alone:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2.0)


@fault("csp: weights clamped in on_train_batch_end", "the weight", **CSP)
class _S4:
    def on_train_batch_end(self: Any, *_: Any) -> None:
        if self.alone:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)


@fault("csp: requires_grad_ in on_train_batch_start", "frozen", **CSP)
class _S5:
    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        if self.alone and batch_idx == 1:
            for parameter in self.net[0].parameters():
                parameter.requires_grad_(False)


@fault("csp: ranks that draw other subnets", "the input of layer", broken=lambda rank: unmarked(), **CSP)
class _S6:
    seed = 1


@fault("csp: layers_of_batch leaves a layer out", "gradient", **CSP)
class _S7:
    def layers_of_batch(self: Any, batch: Any) -> Any:
        found = dict.fromkeys(self.net.layers_of(batch[-1]), True)
        return {**found, "0": False}


@fault("csp: decay of weights without a gradient", "the weight", **CSP)
class _S8:
    def on_train_batch_end(self: Any, *_: Any) -> None:
        if self.alone:
            for parameter in self.parameters():
                if parameter.grad is None:
                    parameter.data.mul_(0.99)


@contextmanager
def unmarked() -> Iterator[None]:
    """Keep the library from comparing the batches of ranks."""
    with (
        patched(SameBatch, "around_batch", lambda self, step: None),
        patched(BetweenSteps, "check_gradients", lambda self, *_, **__: None),
    ):
        yield


# ---- running the faults


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(WIDTH, generator=g).double(), torch.randint(0, 3, (), generator=g)) for _ in range(4 * ROWS)]


def trained(rank: int, each: Fault, verify: int | str = 4, **settings: Any) -> str:
    """Return the sentence with which `verify` ends a training, on one of the ranks."""
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    warnings.simplefilter("ignore")
    _LEFT.clear()
    DRAWS.seed(0)
    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    heard = Heard()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(heard)
    module = each.kind()
    strategy = {"partition": [BLOCKS // 2], "microbatches": 2} | each.strategy | settings
    options = {"limit_train_batches": 1, "max_epochs": 3} | each.trainer
    loader: Any = DataLoader(batches(), batch_size=ROWS)
    validation: Any = DataLoader(batches(), batch_size=ROWS)
    if isinstance(module, Search):
        space = module.net.space
        seed = rank * module.seed
        loader, validation = SubnetStream(Uniform(space, seed=seed)).pair_with(loader), None
        options = {"max_epochs": 1}
    trainer = make_trainer(
        devices=RANKS, strategy=PipelineStrategy(verify=verify, **strategy), num_sanity_val_steps=0, **options
    )
    try:
        with each.broken(rank):
            trainer.fit(module, loader, validation)
    except BaseException as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        logger.removeHandler(heard)
    return next((text for text in reversed(said) if "verify=" in text), "; ".join(said[-1:]))


def all_trained(rank: int, faults: Sequence[int], verify: int | str, settings: dict[str, Any]) -> list[str]:
    """Return the sentences of several faults, which are trained one after another in the same processes."""
    return [trained(rank, FAULTS[number], verify, **settings) for number in faults]


def found(faults: Sequence[int], verify: int | str = 4, **settings: Any) -> list[str]:
    """Return the sentence of each fault on rank 0."""
    try:
        return run_ranks(all_trained, RANKS, faults, verify, settings, timeout=60 + 10 * len(faults))[0]  # type: ignore[no-any-return]
    except RanksFailedError as error:
        return [f"no end: {error}"] * len(faults)


# ---- modules that are cut by units

BY_UNITS: dict[str, Any] = {"module": ""}
NOT_FOUND_BY_UNITS = {
    "attribute of layers set in on_train_epoch_end": EQUAL,
    "layers in evaluation mode with dropout": EQUAL,
    "frozen BatchNorm that is trained": EQUAL,
    "gradients of shared parameters not summed": EQUAL,
    "forward hook registered in on_validation_epoch_end": "it called mul as unit",
    "clipping in optimizer_step by the norm of one stage": "takes the value of the gradient of self.",
    "batches that differ by rank later": "loaded different batches",
}
"""Faults that occur only if layers are cut, and are equal by units, and faults that another check refuses first."""
LAID_BY_UNITS = [number for number, fault in enumerate(FAULTS) if not fault.name.startswith("csp")]
"""The numbers of the faults that can be made in modules that are cut by units."""


def is_found_by_units(fault: Fault, said: str) -> bool:
    """Return whether the sentence about a training by units names the fault, or what the fault causes instead."""
    if fault.name in NOT_FOUND_BY_UNITS:
        return NOT_FOUND_BY_UNITS[fault.name] in said
    place = "the input of '" if fault.finds.startswith("the input of") else fault.finds
    place = "the input of 'outlet'" if fault.name == "alias changed in place by a later layer" else place
    return FOUND in said and place in said.partition("Likely reason")[0]
