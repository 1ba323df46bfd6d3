"""Modules of rows about the values that steps log and return, gradients within steps, and parts of batches."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.compat.registry import batches
from tests.compat.runs import loaders
from tests.compat.state_modules import Annealed
from tests.trainer.lit import WIDTH, Lit, LitOutside, data

BOTH = {"on_step": True, "on_epoch": True}


class LogsReduced(Lit):
    """A module that logs constants, numbers of samples, sums and means, each with every reduction."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        found = {
            "one": 1.0,
            "index": float(batch_idx),
            "epoch": float(self.current_epoch),
            "rows": float(len(x)),
            "rows_tensor": torch.tensor(len(x)),
            "loss": loss,
            "right": (logits.argmax(1) == y).double().sum(),
        }
        for how in ("mean", "sum", "max", "min"):
            self.log_dict({f"{name}_{how}": value for name, value in found.items()}, reduce_fx=how, **BOTH)
        return loss


class LogsSpread(Lit):
    """A module that logs and returns statistics that are not a mean or a sum over micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("spread", batch[0].std(), **BOTH)
        return {"loss": loss, "most": batch[0].max(), "sorted": batch[1].sort().values}


class LogsLater(Lit):
    """A module that logs a number that is 0 in the first batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("events", float(self.global_step > 4), reduce_fx="sum", **BOTH)
        return self.loss(batch)


class ReturnsNumbers(Lit):
    """A module that returns integers, flags, counts, words, shapes and lists together with its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        return {
            "loss": loss,
            "rows": len(x),
            "index": batch_idx,
            "half": 0.5,
            "flag": True,
            "word": "train",
            "right": (logits.argmax(1) == y).sum(),
            "mean": logits.detach().mean(),
            "classes": torch.bincount(y, minlength=3),
            "by_class": torch.zeros(3, 3, dtype=torch.long).index_put((y, logits.argmax(1)), torch.tensor(1), True),
            "nested": {"rows": len(x), "mean": float(logits.detach().mean())},
            "shape": x.shape,
            "numbers": x[:, 0].tolist(),
            "first": float(x[0, 0]),
        }


class PassesLoss(nn.Module):
    """A layer that adds its auxiliary loss to the loss that it receives with its input.

    Args:
        linear: whether the auxiliary loss is a mean over samples.
    """

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        h, loss = given if isinstance(given, tuple) else (given, 0.0)
        h = self.inner(h)
        return torch.tanh(h), loss + (h.pow(2).mean() if self.linear else h.mean(0).pow(2).sum())


class LeavesLoss(PassesLoss):
    """A layer that stores its auxiliary loss in an attribute."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h, self.loss = super().forward(h)
        return h


class PassesLosses(Lit):
    """A module whose layers pass on the sum of their auxiliary losses."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(*(PassesLoss(linear) for _ in range(6)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out, extra = self.model(batch[0])
        return F.cross_entropy(out, batch[1]) + extra

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass


class LeavesLosses(Lit):
    """A module in which a layer of the last stage stores an auxiliary loss in an attribute."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), LeavesLoss(linear), nn.Linear(WIDTH, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.model[4].loss


def with_table(samples: Any) -> dict[str, Any]:
    """Return a batch with class weights. The number of classes is equal to the number of samples."""
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "y": y, "by_class": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


class WeighsClasses(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"]), batch["y"], weight=batch["by_class"])


class LooksUpBefore(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"] * batch["by_class"][batch["y"]][:, None]), batch["y"])


class ReturnsOdd(Lit):
    """A module whose step returns a value that is not a loss with gradients."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(self.loss(batch))


class WithoutLayers(Lit):
    """A module whose evaluation steps do not call the layers."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("sum", batch[0].sum() * (batch_idx + 1), batch_size=len(batch[0]))
        self.seen.append(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", batch[0].mean(), batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum(1)


class Storage(TorchCheckpointIO):
    """A checkpoint plugin that records its storage options."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.options.append(storage_options)


def fit_by_a_copy(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    """Train for another epoch with a copy of the Trainer, and return the results."""
    other = copy.deepcopy(trainer)
    other.fit_loop.max_epochs = 3
    again = Lit().double()
    again.load_state_dict(module.state_dict())
    other.fit(again, **loaders())
    return dict(again.state_dict()), other.global_step, dict(other.callback_metrics)


def save_with_options(trainer: pl.Trainer, module: Any, folder: Path) -> None:
    trainer.save_checkpoint(folder / "with options", storage_options={"a": 1})


class FailsByItself(Lit):
    """A module whose step raises its own error after the layers, in the second batch."""

    failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.failed and batch_idx == 1:
            self.failed = True
            raise IndexError("no size fits the shape")
        return loss


class PenalisesUnused(Lit):
    """A module with a gradient penalty that counts a missing gradient as zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True, allow_unused=True)
        return F.cross_entropy(out, y) + (0 if g is None else g.pow(2).sum(1).mean())


class PenalisesAround(Lit):
    """A module with a gradient penalty and a skip around the layers, through which a part of the gradient flows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x) + x[:, :3].pow(3)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + g.pow(2).sum(1).mean()


class PenalisesKeptWeights(Lit):
    """A module with a penalty on the gradients of weights that it stored in a list when it was created."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        found = torch.autograd.grad(loss, self.kept, create_graph=True, allow_unused=True)
        return loss + 0.1 * sum(g.pow(2).sum() for g in found if g is not None)


class PenalisesOutput(LitOutside):
    """A module with a penalty on the gradient with respect to the output of the layers, within one stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        inner = self.inlet(x)
        hidden = self.model(inner)
        out = self.outlet(torch.cat([hidden, inner], dim=1))
        loss = F.cross_entropy(out, y)
        (g,) = torch.autograd.grad(loss * len(x), hidden, create_graph=True, allow_unused=True)
        return loss + g.pow(2).sum(1).mean()


class PenalisesBefore(LitOutside):
    """A module with a penalty on the gradient of the code before the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        inner = self.inlet(x).tanh()
        (g,) = torch.autograd.grad(inner.sum(), x, create_graph=True)
        out = self.outlet(torch.cat([self.model(inner), inner], dim=1))
        return F.cross_entropy(out, y) + g.pow(2).sum(1).mean()


class BackwardInStep(Lit):
    """A module that calls `backward` in its step, and penalizes the gradient of its input."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x)
        loss = F.cross_entropy(out, y)
        loss.backward(retain_graph=True)
        return loss if x.grad is None else loss + x.grad.pow(2).sum(1).mean()


class GradInValidation(Lit):
    """A module that computes gradients with respect to its input (saliency) in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            out = self(x) + x[:, :3].pow(3)
            (g,) = torch.autograd.grad(out.sum(), x, allow_unused=True)
            self.log("saliency", g.abs().mean())
            self.seen.append(out.detach())


class Remembered(Lit):
    """A module whose hook reads or changes the state of its optimizer in the way that `use` specifies."""

    use = "norm"

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        match self.use:
            case "norm":
                self._slow_down(sum(float(state["exp_avg"].norm()) for state in optimizer.state.values()))
            case "dict":
                states = optimizer.state_dict()["state"]
                self._slow_down(sum(float(state["exp_avg"].norm()) for state in states.values()))
            case "total":
                norm = torch.nn.utils.get_total_norm([state["exp_avg"] for state in optimizer.state.values()])
                self._slow_down(float(norm))
            case "number":
                self.log("states", float(len(optimizer.state)))
                self.log("numbered", float(len(optimizer.state_dict()["state"])))
                self.log("known", float(sum(p in optimizer.state for p in self.parameters())))
            case "scaled":
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
                    state["exp_avg_sq"] = state["exp_avg_sq"] * 0.9
                for p in self.parameters():
                    optimizer.state[p]["exp_avg"].add_(0.01 * p.detach())
                    optimizer.state.get(p)["kept"] = optimizer.state[p].get("kept", 0.0) + p.detach() / 2
                    optimizer.state[p]["exp_avg"].sub_(0.01 * optimizer.state[p]["kept"])
            case "cleared" if batch_idx == 1:
                optimizer.state.clear()
            case "replaced" if batch_idx == 1:
                optimizer.optimizer.state = defaultdict(dict)

    def _slow_down(self, norm: float) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + norm)


class WeighsByMistakes(Annealed):
    """A module that weights classes by the number of mistakes in validation.

    After the first validation, its loss is a mean over these weights, not over samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y, weight=self.weights)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        wrong = y[self(x).argmax(1) != y]
        self.weights += torch.bincount(wrong, minlength=3)


class MixesSamples(Annealed):
    """A module that trains on random mixtures of two samples of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        other = torch.randperm(len(x))
        logits = self(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[other])


class Contrasts(Annealed):
    """A module that compares each sample with all other samples of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        logits = self(x) @ self(-x).T
        return F.cross_entropy(logits, torch.arange(len(x)))


class ChangesWeights(Lit):
    """A module whose `training_step` changes weights with `change`, before or after the layers."""

    def __init__(self, change: Any, after: bool = False) -> None:
        super().__init__(optimizer="sgd")
        self.scale = nn.Parameter(torch.tensor(0.02))
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.change, self.after = change, after

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if not self.after:
            self.change(self)
        loss = F.cross_entropy(self.model(x) / self.scale.exp(), y)
        target = self.teacher(x).softmax(1)
        if self.after:
            self.change(self)
        return loss + F.mse_loss(self.model(x).softmax(1), target)


@torch.no_grad()
def clamp_scale(module: Any) -> None:
    module.scale.clamp_(0.01, 0.03)


@torch.no_grad()
def normalize_head(module: Any) -> None:
    module.model[-1].weight.copy_(F.normalize(module.model[-1].weight, dim=1))


@torch.no_grad()
def average_weights(module: Any) -> None:
    for p, q in zip(module.model.parameters(), module.teacher.parameters(), strict=True):
        q.data.mul_(0.9).add_(p.data, alpha=0.1)


def copy_weights(module: Any) -> None:
    module.teacher.load_state_dict(module.model.state_dict())


def assign_weights(module: Any) -> None:
    module.model[-1].weight.data = module.model[-1].weight.data * 0.9


class ChangesAround(LitOutside):
    """A module with parameters around its layers, whose `training_step` changes weights like `ChangesWeights`."""

    def __init__(self, change: Any, after: bool = False) -> None:
        super().__init__(optimizer="sgd")
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.change, self.after = change, after

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if not self.after:
            self.change(self)
        target = self.teacher(x)
        loss = F.cross_entropy(self(x), y) + F.mse_loss(self.inlet(x), target)
        if self.after:
            self.change(self)
        return loss


@torch.no_grad()
def clamp_layer(module: Any) -> None:
    module.model[4][0].weight.clamp_(-0.2, 0.2)


def scale_layer_data(module: Any) -> None:
    module.model[4][0].weight.data.mul_(0.9)


def scale_head_data(module: Any) -> None:
    module.outlet.weight.data.mul_(0.9)


def permute_head_data(module: Any) -> None:
    module.outlet.weight.data.copy_(module.outlet.weight.data.roll(1, 0))


def scale_head_later(module: Any) -> None:
    if module.global_step >= 1:
        scale_head_data(module)


def assign_head_data(module: Any) -> None:
    module.outlet.weight.data = module.outlet.weight.data * 0.9


@torch.no_grad()
def average_inlet(module: Any) -> None:
    for own, other in zip(module.teacher.parameters(), module.inlet.parameters(), strict=True):
        own.data = 0.9 * own.data + 0.1 * other.data


class ChangesItself(nn.Linear):
    """A layer that changes its weight with `change` in every forward of training."""

    def __init__(self, change: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.change(self)
        return super().forward(x)


class ChangesInside(Lit):
    """A module in which one layer changes its own weight with `change`."""

    def __init__(self, change: Any) -> None:
        super().__init__(optimizer="sgd")
        self.model.insert(4, ChangesItself(change))


def scale_data(layer: Any) -> None:
    layer.weight.data.mul_(0.9)


@torch.no_grad()
def scale_in_place(layer: Any) -> None:
    layer.weight.mul_(0.9)


def replace_parameter(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


def write_through_numpy(module: Any) -> None:
    weight = module.model[-1].weight.detach().numpy()
    weight *= 0.9


def replace_last(module: Any) -> None:
    replace_parameter(module.model[-1])


class Generates(pl.LightningModule):
    """A module that validates and predicts by greedy decoding.

    It calls the layers and the head again for each generated token.

    Args:
        container: the type of the container of layers.
        caches: whether layers store keys and values, so that each call after the first one processes one token.
    """

    def __init__(self, container: type[nn.Sequential | nn.ModuleList], caches: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layers = [CausalBlock(caches) for _ in range(5)]
        self.layers = nn.Sequential(*layers) if container is nn.Sequential else nn.ModuleList(layers)
        self.head = nn.Linear(8, 11)
        self.caches = caches
        self.texts: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if isinstance(self.layers, nn.Sequential):
            return self.head(self.layers(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def generate(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        logits = self(tokens)
        for _ in range(length):
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            logits = self(tokens[:, -1:] if self.caches else tokens)
        return tokens

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, _ = batch
        return F.cross_entropy(self(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, _ = batch
        self.log("val_loss", F.cross_entropy(self(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]))
        self.texts.append(self.generate(tokens[:, :2], 3))
        self.log("right", (self.texts[-1] == tokens).double().mean())

    def on_validation_epoch_end(self) -> None:
        weights = torch.arange(5.0)
        self.log("texts", (torch.cat(self.texts) * weights).sum())
        self.texts.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.generate(batch[0][:, :2], 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class CausalBlock(nn.Module):
    """A layer with causal attention over all tokens, which can store the keys and values of earlier tokens."""

    def __init__(self, caches: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(8, 24), nn.Linear(8, 8)
        self.caches = caches
        self.past: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).chunk(3, -1)
        if self.caches and not self.training:
            if x.shape[1] == 1:
                k, v = torch.cat([self.past[0], k], 1), torch.cat([self.past[1], v], 1)
            self.past = k, v
        return x + self.outputs(F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1))


class SemiSupervised(LitOutside):
    """A module that trains on labelled samples, and on unlabelled samples if it is sure of their labels.

    It calls the layers three times per step: on labelled samples, and on two views of unlabelled samples.

    Args:
        joined: whether one call of the layers gets all inputs.
    """

    def __init__(self, joined: bool = False) -> None:
        super().__init__(optimizer="sgd")
        self.joined = joined

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), (u,) = batch["labelled"], batch["unlabelled"]
        if self.joined:
            known, weak, strong = self(torch.cat([x, u, u + 0.1])).split([len(x), len(u), len(u)])
        else:
            known, weak, strong = self(x), self(u), self(u + 0.1)
        sure, label = weak.detach().softmax(1).max(1)
        supervised = F.cross_entropy(known, y)
        unsupervised = (F.cross_entropy(strong, label, reduction="none") * (sure > 0.4)).mean()
        self.log_dict({"supervised": supervised, "unsupervised": unsupervised})
        return supervised + 0.5 * unsupervised


def two_loaders(rows: int, size: int) -> dict[str, Any]:
    """Return a training loader that combines batches of 8 labelled and `size` unlabelled samples.

    The loader with fewer batches starts again.
    """
    unlabelled = TensorDataset(data(rows).tensors[0])
    both = {"labelled": DataLoader(data(), 8), "unlabelled": DataLoader(unlabelled, size)}
    return batches(CombinedLoader(both, "max_size_cycle"))


class ChangesInput(LitOutside):
    """A module whose first layer adds in place to a tensor that the loss reads later.

    Args:
        trained: whether the layer adds a parameter and the step computes the layer's input, so that gradients flow
            through both.
    """

    def __init__(self, trained: bool) -> None:
        super().__init__(optimizer="sgd")
        self.model[0] = AddsInPlace(trained)
        self.trained = trained

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        entering = self.inlet(x) * 2 if self.trained else x
        logits = self.outlet(torch.cat([self.model(entering), entering], 1))
        return F.cross_entropy(logits, y) + 0.1 * (entering[:, :3].tanh() * logits.tanh()).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        """Log nothing else."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class AddsInPlace(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH)) if trained else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.bias)


class TakesOtherWay(Lit):
    """A module whose step takes another way on one rank, after the first batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trainer.training and self.trainer.global_step and self.trainer.is_global_zero:
            x = x.neg().neg()
        return super().forward(x)


class ReadsMemory(Lit):
    """A module whose step passes the address of a weight on, as to an extension in C++."""

    address = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trainer.training and self.trainer.global_step:
            self.address = self.model[8].weight.data_ptr()
        return super().forward(x)


class Checkpointed(Lit):
    """A module that computes some of its layers again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model[1](self.model[0](x))
        x = checkpoint(lambda h: self.model[4](self.model[3](self.model[2](h))), x, use_reentrant=False)
        for layer in self.model[5:]:
            x = layer(x)
        return x
