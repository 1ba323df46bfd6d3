"""Modules of rows about gradients, norms, optimizer steps, and code that depends on several samples at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from tests.trainer.lit import WIDTH, Lit, LitOutside

MOST = 0.05
"""Norm to which these modules clip gradients. The gradients of every batch have a larger norm."""


def all_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def own_norm(tensors: Any) -> torch.Tensor:
    """Return the norm of all tensors, computed without torch's functions for norms."""
    return torch.stack([t.pow(2).sum() for t in tensors]).sum().sqrt()


class ClipsInStep(LitOutside):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            clip_grad_norm_(self.parameters(), MOST)
            return loss

        optimizer.step(closure=closure)


class ClipsBetweenClosureAndStep(LitOutside):
    """A module that calls the closure before the optimizer step, so that it can log the gradient norm."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        loss = optimizer_closure()
        self.log("norm", clip_grad_norm_(self.parameters(), MOST))
        optimizer.step(closure=lambda: loss)


class ClipsGroups(LitOutside):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", clip_grad_norm_(all_of(optimizer), MOST))


class ClipsEachGroup(LitOutside):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], MOST)


class ClipsGroupsOfTrainer(LitOutside):
    def on_after_backward(self) -> None:
        clip_grad_norm_(all_of(self.optimizers()), MOST)


class ScalesByOwnNorm(LitOutside):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = own_norm(p.grad for p in all_of(optimizer) if p.grad is not None)
        for p in all_of(optimizer):
            if p.grad is not None:
                p.grad.mul_(MOST / float(norm))


class ScalesByOwnNormInStep(LitOutside):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = own_norm(grads)
        for g in grads:
            g.mul_(MOST / norm)
        optimizer.step()


class KeepsParameters(Lit):
    """A module that stores some of its parameters in a list when it is created."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [p for name, p in self.named_parameters() if name.endswith("weight")]


class ClipsKept(KeepsParameters):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.decayed, MOST)


class PenalisesKept(KeepsParameters):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        return {**out, "loss": out["loss"] + 0.1 * own_norm(self.decayed)}


class DecaysKept(KeepsParameters):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.decayed:
                p.mul_(0.9)


class RescalesKept(KeepsParameters):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            norm = own_norm(self.decayed)
            for p in self.decayed:
                p.div_(norm)


class ClippingSGD(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip_grad_norm_(all_of(self), MOST)
        super().step()
        return loss


class Lamb(Optimizer):
    """An optimizer that scales the step of each tensor by the ratio of weight norm to gradient norm, as LAMB does.

    If `whole` is set, it also divides all gradients by the norm of all gradients.
    """

    def __init__(self, params: Any, lr: float = 0.05, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.whole = whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norm = own_norm(p.grad for p in all_of(self) if p.grad is not None) if self.whole else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.sub_(group["lr"] * torch.where(ratio > 0, ratio, 1.0) * p.grad / norm)
        return loss


class SAM(Optimizer):
    """Sharpness-aware minimization (SAM), which calls the closure twice.

    If `norm` is set, the perturbation is divided by the norm of all gradients.
    """

    def __init__(self, params: Any, base: Any = SGD, rho: float = 0.05, norm: bool = True, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups
        self.norm = norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        norm = own_norm(p.grad for p in all_of(self) if p.grad is not None) if self.norm else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["was"] = p.clone()
                    p.add_(p.grad * group["rho"] / norm)
        closure()
        for p in all_of(self):
            if "was" in self.state[p]:
                p.copy_(self.state[p]["was"])
        self.base.step()
        return loss


class NoisySGD(SGD):
    """SGD that adds noise to the weights, as in stochastic gradient Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in all_of(self):
            p.add_(0.01 * torch.randn_like(p))
        return loss


class LitBy(LitOutside):
    """A module that is trained by the optimizer that `make(parameters)` returns."""

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.__dict__["make"] = make

    def configure_optimizers(self) -> Any:
        return self.__dict__["make"](self.parameters())


def with_step_hook(parameters: Any) -> Optimizer:
    parameters = list(parameters)
    optimizer = SGD(parameters, lr=0.3)

    def clip(*_: Any) -> None:
        clip_grad_norm_(parameters, MOST)

    optimizer.register_step_pre_hook(clip)
    return optimizer


# ---- several samples at a time


class LitBefore(LitOutside):
    """A module that applies `before(module, x)` to its input before the layers."""

    def __init__(self, before: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["before"] = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.inlet(self.__dict__["before"](self, x)))


def centred(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def numbered(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(len(x))[:, None] / 10


def ordered(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0].argsort()]


def tempered(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Divide a batch by its standard deviation."""
    return x / x.std()


def by_the_first(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x[0].argmax() < 3 else x


def by_the_second_batch(module: Any, x: torch.Tensor) -> torch.Tensor:
    return centred(module, x) if module.trainer.fit_loop.batch_idx == 1 else x


def each_by_itself(module: Any, x: torch.Tensor) -> torch.Tensor:
    return by_sample(x)


class Layer(nn.Module):
    def __init__(self, work: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(self.linear(x))


class LitInLayer(Lit):
    """A module in which one layer applies the function `work` after its weights."""

    def __init__(self, work: Callable[[torch.Tensor], torch.Tensor], at: int = 4) -> None:
        super().__init__()
        self.model[at] = Layer(work)


def in_layer_centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def in_layer_softmax(x: torch.Tensor) -> torch.Tensor:
    return x * torch.softmax(x, 0)


def in_layer_first(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x[0].argmax() < 3 else x


def by_sample(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(1, keepdim=True)


# ---- hooks of modules and parameters


class BackwardHookOnAll(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model.register_full_backward_hook(lambda module, before, after: before)


class BackwardHookOnAllLater(Lit):
    def on_fit_start(self) -> None:
        self.model.register_full_backward_hook(lambda module, before, after: before)


class ForwardHookOnAllLater(Lit):
    def on_train_start(self) -> None:
        self.model.register_forward_hook(lambda module, args, out: out * 2)


class BackwardHookOnLayers(Lit):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.model[1:]:
            layer.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))


class ClampsGradients(LitOutside):
    """A module that registers nonlinear hooks on its parameters."""

    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))


class ClampsInside(Lit):
    """The hooks of `ClampsGradients` in a module without code around its layers."""

    on_fit_start = ClampsGradients.on_fit_start  # type: ignore[assignment]


class ScalesByOwnNormInside(Lit):
    """The hook of `ScalesByOwnNorm` in a module without code around its layers."""

    on_before_optimizer_step = ScalesByOwnNorm.on_before_optimizer_step  # type: ignore[assignment]


class ClampsGradientsFromTheStart(LitOutside):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g.sign())


class StepsInBackward(Lit):
    """A module that updates each weight as soon as its gradient is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.stepped)

    @staticmethod
    @torch.no_grad()
    def stepped(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.sub_(0.1 * p.grad.sign())
        p.grad = None


class MasksGradients(LitOutside):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g * (g > 0))


# ---- hooks that change weights, gradients, layers or parameter groups


class Resets(LitOutside):
    def on_train_epoch_start(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


class Initialises(LitOutside):
    def on_train_start(self) -> None:
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.xavier_normal_(p)
            else:
                nn.init.constant_(p, 0.1)
        nn.init.orthogonal_(self.model[0][0].weight)
        self.model.apply(lambda m: nn.init.kaiming_uniform_(m.weight) if isinstance(m, nn.Linear) else None)


class AddsNoise(LitOutside):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(0.01 * torch.randn_like(p.grad))


class DrawsMasks(LitOutside):
    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.mul_(torch.bernoulli(torch.full_like(p, 0.9)))
            p.add_(torch.rand(p.shape, dtype=p.dtype) * 0.01)


class Appends(Lit):
    def on_train_epoch_start(self) -> None:
        self.model.append(nn.Linear(3, 3).double())


class Replaces(Lit):
    def on_train_epoch_start(self) -> None:
        self.model[1] = nn.ReLU()


class Removes(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(self.extra(x) if hasattr(self, "extra") else x)
        return out

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            del self.extra


class Slices(Lit):
    """A module whose hook replaces the container by a shorter one with some of its layers."""

    def on_train_epoch_start(self) -> None:
        self.model = nn.Sequential(*self.model[:2], nn.Linear(WIDTH, 3).double())


class ReplacesInside(Lit):
    def on_train_epoch_start(self) -> None:
        self.model[2][0] = nn.Linear(WIDTH, WIDTH).double()


class AddsGroup(LitOutside):
    def configure_optimizers(self) -> Any:
        return SGD(self.model[4:].parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.model[:4].parameters()), "lr": 0.2})


class Penalises(Lit):
    """A module with a gradient penalty, which needs the gradient of the layers with respect to their input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + g.pow(2).sum(1).mean()
