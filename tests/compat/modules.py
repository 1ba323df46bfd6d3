"""Ordinary LightningModules and callbacks of the rows, written without regard to pipelines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    LearningRateFinder,
    ModelSummary,
    RichModelSummary,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.core.hooks import CheckpointHooks, ModelHooks
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import TransformerEnginePrecision
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.trainer.lit import WIDTH, Lit, LitTied, data, plain_values


class Endless(IterableDataset[Any]):
    """The samples as an iterable dataset, which has no length."""

    def __iter__(self) -> Any:
        return iter(data())


class LitFloat(Lit):
    """A module that computes in the precision of its weights, which the Trainer sets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.to(next(self.model.parameters()).dtype))


class LitFloat8(LitFloat):
    """A module whose layers multiply in emulated float8."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(self.model, config=Float8LinearConfig(emulate=True))


def no_torchao() -> str:
    return "" if find_spec("torchao") else "torchao is not installed"


class BareTransformerEngine(TransformerEnginePrecision):
    """A version of Lightning's plugin that can be created if Transformer Engine is not installed."""

    def __init__(self) -> None:
        self.weights_dtype = self.fallback_compute_dtype = torch.float64
        self.replace_layers = False


class LitManyLoaders(Lit):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("by_loader", self.seen[-1].sum(), add_dataloader_idx=True)


class LitTwoLoaders(Lit):
    """A module whose batches are dicts with one batch from each of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["a"][0] + batch["b"][0]), batch["a"][1])


def two_loaders() -> dict[str, Any]:
    return {"a": DataLoader(data(), batch_size=8), "b": DataLoader(data(), batch_size=8)}


def with_a_worker() -> DataLoader[Any]:
    """Return a loader with a forked worker, which is torch's default on Linux.

    A rank would otherwise spawn its workers, because ranks are spawned themselves.
    """
    return DataLoader(data(), batch_size=8, num_workers=1, multiprocessing_context="fork")


class LitReloading(Lit):
    """A module that loads different data in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    def train_dataloader(self) -> Any:
        self.loaded.append(self.current_epoch)
        return DataLoader(data(9 + 4 * self.current_epoch), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(data(13), batch_size=5)


class LitInference(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("inference", float(torch.is_inference_mode_enabled()))
        self.log("gradients", float(torch.is_grad_enabled()))


class NanBackward(nn.Module):
    """A layer whose forward is finite, but whose gradients are NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x * 0.0)


class LitNan(Lit):
    """A module in which the backward of the first stage produces NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = NanBackward()


class LitShown(Lit):
    """A module that shows its loss in the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("shown", loss, prog_bar=True)
        return loss


class LitRaising(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ValueError("the second batch is bad")
        return super().training_step(batch, batch_idx)


class LitWith(Lit):
    """A module with the optimizers and schedulers that `configure(module)` returns."""

    def __init__(self, configure: Any) -> None:
        super().__init__()
        self.__dict__["configure"] = configure

    def configure_optimizers(self) -> Any:
        return self.__dict__["configure"](self)


class LitFrozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model[2].parameters():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)


class LitOwnClipping(Lit):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02 * (1 + self.current_epoch))


class LitWarmUp(Lit):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)


class LitNorms(Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class Norms(Callback):
    """A callback that logs the norms of all gradients, and a value of its own."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.log_dict({f"norms/{name}": norm for name, norm in grad_norm(module, norm_type="inf").items()})
        module.log("step", float(trainer.global_step))


class LitOneCycle(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class LitSized(Lit):
    """A module with a `batch_size` that the batch size finder can set."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(data(13), batch_size=5)


class LitRate(Lit):
    """A module with an `lr` that the learning rate finder can set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class LateFinder(LearningRateFinder):
    """A learning rate finder that runs at the start of epochs 0 and 2."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, module)


class LitManual(Lit):
    """A module that accumulates and clips gradients in its own code, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (self.model[:3], self.model[3:])]


class Net(nn.Module):
    """A network with layers that are not a direct child of the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


class LitNested(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()


class Pair(nn.Module):
    """A layer that takes and returns a tuple. One of its tensors passes unchanged through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, first = pair
        return torch.tanh(self.linear(x) + first), first


class LitTuple(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Pair(), Pair(), Pair(), Pair())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last, first = self.model((x, x.detach() * 0.5))
        return self.head(last * first)


class Entry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "x": torch.tanh(self.linear(state["x"])) * state["mask"]}


class LitDict(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Entry(), Entry(), Entry(), Entry())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model({"x": x, "mask": (x > 0).to(x.dtype)})["x"])


class LitCompiled(Lit):
    """A module with individually compiled layers. The backend "eager" needs no compiler."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.model = nn.Sequential(*(torch.compile(layer, backend="eager") for layer in self.model))


class LitInductor(Lit):
    """A module with layers that are individually compiled to machine code."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.model = nn.Sequential(*(torch.compile(layer, backend="inductor") for layer in self.model))


def inducing(folder: Path) -> dict[str, Any]:
    """Return Trainer options for `LitInductor`, after preparing the compiler of this process.

    Compiled code goes to the run's folder. Without validation, layers are compiled for training only.
    """
    torch.compiler.reset()  # other rows have also compiled, and the number of compilations is limited per process
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder / f"rank-{os.getpid()}"), TORCHINDUCTOR_COMPILE_THREADS="1")
    return {"limit_val_batches": 0, "num_sanity_val_steps": 0}


def induced(trainer: pl.Trainer, folder: Path) -> bool:
    """Return whether this process has compiled code with inductor."""
    return any((folder / f"rank-{os.getpid()}").rglob("*.so"))


def no_compiler() -> str:
    """Return the reason why inductor cannot run on this machine, or an empty string."""
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return "" if any(which(name) for name in compilers if name) else "inductor needs a C++ compiler"


class LitDictBatch(Lit):
    """A module whose batches are dicts of tensors, strings, and a number that is the same for all samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch["names"]) == len(batch["x"])
        return batch["scale"][0] * F.cross_entropy(self(batch["x"]), batch["y"])


def named_samples() -> DataLoader[Any]:
    rows = [{"x": x, "y": y, "names": f"sample {n}", "scale": 2.0} for n, (x, y) in enumerate(data())]
    return DataLoader(rows, batch_size=8)


class LitBatchNorm(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model[1] = nn.BatchNorm1d(WIDTH)


class LitConfigured(Lit):
    """A module that creates its layers in `configure_model`, and only once."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 3))


class LitOfNet(Lit):
    """A module that gets its network as an argument, as in common templates."""

    def __init__(self, net: nn.Module, criterion: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.model, self.criterion = net, criterion

    @classmethod
    def of_layers(cls) -> LitOfNet:
        return cls(Lit().model, nn.CrossEntropyLoss())

    @staticmethod
    def load_last(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
        """Return the weights of the module loaded from the checkpoint, and of the network in its hyperparameters."""
        loaded = LitOfNet.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=False)
        return dict(loaded.state_dict()), dict(loaded.hparams["net"].state_dict())


class LitSynced(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("synced", loss, on_epoch=True, sync_dist=True)
        self.log("right", (logits.argmax(1) == y).double().sum(), reduce_fx="sum", on_epoch=True, sync_dist=True)
        return loss


class LitSkipping(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        return out if batch_idx != 1 else None


class Data(pl.LightningDataModule):
    """A data module that records which of its hooks ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(data(13), batch_size=5)


def log_lambda(trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
    module.log("from_lambda", outputs["scale"])


class StepTimer(Timer):
    """A timer that counts one second per step, and stops training after four."""

    def __init__(self) -> None:
        super().__init__(timedelta(seconds=4))
        self.steps = 0

    def time_elapsed(self, stage: Any = "train") -> float:
        return float(self.steps)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps = trainer.global_step
        super().on_train_batch_end(trainer, *args)


class Writer(BasePredictionWriter):
    """A prediction writer that records the predictions it receives."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.given: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        self.given.append(plain_values(prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.given.append(plain_values(predictions))


class LitTwice(Lit):
    """A module whose step calls the layers twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) + self(-batch[0]), batch[1])


class LitNorm(Lit):
    """A module with group normalization, which normalizes each sample separately."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = nn.GroupNorm(2, WIDTH)


class Reader(Callback):
    """A callback that logs values from outputs and metrics."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("doubled", 2 * outputs["loss"], on_step=True, on_epoch=False)
        module.log("mean_logit", outputs["logits"].mean(), on_step=True, on_epoch=False)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("from_metrics", trainer.callback_metrics["val_loss"] + 1)


class Mourner(Callback):
    """A callback that records the exception that ended the run."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.errors.append(str(exception))


def trainable(module: Any) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


class Thaw(BaseFinetuning):
    """A callback that trains the first layer only from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model[0], optimizer, lr=0.1)


class LitBackbone(Lit):
    """A module with a backbone, which is cut, and a head outside of it.

    Some weights of the head are equal to weights of the first stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.model
        del self.model
        self.backbone.insert(2, nn.LayerNorm(WIDTH))
        self.head = nn.Sequential(nn.Linear(3, WIDTH), nn.LayerNorm(WIDTH).requires_grad_(False), nn.Linear(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(x))
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=0.1)


class Bar(TQDMProgressBar):
    """A progress bar that records the metrics it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        self.shown.append(self.get_metrics(trainer, module))


class Summary(ModelSummary):
    """A model summary that records the total number of parameters."""

    totals: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.totals = []

    def summarize(self, summary_data: Any, total_parameters: int, *args: Any, **kwargs: Any) -> None:
        self.totals.append(total_parameters)


class RichSummary(RichModelSummary):
    """The same as `Summary`, but with `rich`."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[int] = []

    def summarize(self, summary_data: Any, total_parameters: int, *args: Any, **kwargs: Any) -> None:
        self.totals.append(total_parameters)
        super().summarize(summary_data, total_parameters, *args, **kwargs)


def compiled(module: pl.LightningModule) -> Any:
    return torch.compile(module, backend="eager")


def tensorboard(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"logger": TensorBoardLogger(folder, name="runs", **settings)}


def tensorboard_graph(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the number of nodes in the logged graph, or None on ranks other than 0."""
    if not trainer.is_global_zero:
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.*")
    events = EventAccumulator(str(file)).Reload()
    return len(events.Graph().node) if events.Tags()["graph"] else None


def tensorboard_rows(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the number of runs, the number of event files, and all scalars by name.

    Ranks other than 0 return None.
    """
    if not trainer.is_global_zero:
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = sorted({path.parent for path in folder.rglob("events.*")})
    events = EventAccumulator(str(runs[0])).Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return len(runs), len(list(folder.rglob("events.*"))), scalars


def lacks(package: str) -> str:
    return "" if find_spec(package) else f"{package} is not installed"


def mlflow(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.loggers import MLFlowLogger

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # with a database, every rank would create its tables
    return {"logger": MLFlowLogger("runs", save_dir=str(folder / "mlruns"))}


def mlflow_rows(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the number of runs and all logged values by name, or None on ranks other than 0."""
    if not trainer.is_global_zero:
        return None
    logger: Any = trainer.logger
    client = logger.experiment
    runs = client.search_runs([logger.experiment_id])
    names = sorted(runs[0].data.metrics)
    return len(runs), {
        name: [(v.step, v.value) for v in client.get_metric_history(logger.run_id, name)] for name in names
    }


def wandb(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.loggers import WandbLogger

    return {"logger": WandbLogger("runs", save_dir=folder, offline=True, settings={"console": "off"})}


def wandb_rows(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the number of runs and the last value of each name, or None on ranks other than 0."""
    if not trainer.is_global_zero:
        return None
    logger: Any = trainer.logger
    last = {k: v for k, v in dict(logger.experiment.summary).items() if not k.startswith("_")}
    logger.experiment.finish()
    return len(list(folder.rglob("run-*.wandb"))), plain_values(last)


# ---- methods that users override


class LitTransfers(Lit):
    """A module that overrides every hook between the loader and the device.

    The hooks scale the samples, move the tensors, and mix random pairs of samples during training.
    """

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 2, batch[1]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return tuple(part.to(device) for part in batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        if self.trainer.training:
            share = torch.rand(len(x), 1, dtype=x.dtype)
            x = share * x + (1 - share) * x[torch.randperm(len(x))]
        return x, y


class LitOwnSteps(Lit):
    """A module that clears gradients and steps its learning rate scheduler in its own code."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()


class LitBringsCallbacks(Lit):
    def configure_callbacks(self) -> Any:
        return [Norms(), EarlyStopping("val_loss", patience=1, min_delta=10.0)]


class LitAsks(Lit):
    """A module that calls methods of the Trainer, the strategy, the optimizer and the scheduler."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("next_lr", self.lr_schedulers().get_last_lr()[0])
        self.log("step", float(self.global_step + self.trainer.global_step + self.current_epoch))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("gathered", self.all_gather(outputs["loss"]).sum())
        self.log("reduced", self.trainer.strategy.reduce(outputs["loss"], reduce_op="mean"))

    def on_train_epoch_end(self) -> None:
        self.print("the epoch has ended")


class LitCollects(Lit):
    """A module that collects the losses of all steps until the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_losses", torch.stack(self.losses).mean())
        self.losses.clear()


class LitSkipsAnEpoch(Lit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


class LitHooks(Lit):
    """A module that records the order in which its hooks run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []


def _keeping(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.ran.append(name)
        return getattr(super(LitHooks, self), name)(*args, **kwargs)

    return hook


for _name in vars(ModelHooks).keys() | vars(CheckpointHooks).keys():
    if _name.startswith("on_") and "batch_transfer" not in _name:
        setattr(LitHooks, _name, _keeping(_name))


# ---- data


class Sample(NamedTuple):
    x: torch.Tensor
    more: dict[str, Any]


class LitNestedBatch(Lit):
    """A module whose batches are named tuples with dicts and lists inside."""

    def loss(self, batch: Any) -> torch.Tensor:
        (y, weights), names = batch.more["targets"], batch.more["names"]
        assert len(names) == len(batch.x)
        return (F.cross_entropy(self(batch.x), y, reduction="none") * weights).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def nested_samples() -> DataLoader[Any]:
    rows = [Sample(x, {"targets": [y, 0.5 + n % 3], "names": f"sample {n}"}) for n, (x, y) in enumerate(data())]
    return DataLoader(rows, batch_size=8)


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class LitDataclassBatch(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(batch, Batch)
        return F.cross_entropy(self(batch.x), batch.y)


def dataclass_samples() -> DataLoader[Any]:
    def collate(rows: Any) -> Batch:
        return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))

    return DataLoader(data(), batch_size=8, collate_fn=collate)


class EverySecond(Sampler[int]):
    """A user-defined sampler."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Any:
        return iter(range(0, 22, 2))


# ---- layers


def _tokens_with(embedding: nn.Embedding) -> Any:
    class LitEmbedding(LitTied):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(
                embedding, nn.Flatten(), nn.Linear(5 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    return LitEmbedding()


def sparse_embedding() -> Any:
    return _tokens_with(nn.Embedding(11, WIDTH, sparse=True))


class LitSparseMomentum(Lit):
    """A module with sparse gradients, sparse momentum, and sparse matrices in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(11, WIDTH, sparse=True),
            nn.Flatten(),
            nn.Linear(5 * WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 3),
        )
        self.mixing = torch.eye(3, dtype=torch.float64).roll(1, 0).to_sparse()
        self.scaled: Any = None

    def forward(self, x: Any) -> Any:
        return torch.sparse.mm(self.mixing, self.model(x).t()).t()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scaled = self.mixing * (batch_idx + 1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LitSparseOutside(Lit):
    """A module with a sparse embedding in front of the container."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(5 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x: Any) -> Any:
        return self.model(self.embedding(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def bounded_embedding() -> Any:
    return _tokens_with(nn.Embedding(11, WIDTH, max_norm=0.5))


class LitParametrized(Lit):
    """A module with weights that are computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.model[0][0])
        orthogonal(self.model[4][0])
        register_parametrization(self.model[8], "weight", nn.Softplus())


class LitSpectral(Lit):
    """A module with spectral normalization, which iterates its estimate of the norm in every forward."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.model[2][0])


class LitLazy(Lit):
    """A module with lazy layers, which infer their sizes in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.LazyLinear(WIDTH) for _ in range(4)), nn.LazyLinear(3))
        self.model(torch.zeros(1, WIDTH))


class ToComplex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x)


class Magnitude(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()


class LitComplex(Lit):
    """A module with complex numbers between its layers."""

    def __init__(self) -> None:
        super().__init__()
        middle = [nn.Linear(WIDTH, WIDTH, dtype=torch.complex128) for _ in range(3)]
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ToComplex(), *middle, Magnitude(), nn.Linear(WIDTH, 3))


class Checkpointed(nn.Module):
    """A layer that discards its activations and computes them again for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class LitCheckpointed(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Checkpointed() for _ in range(4)), nn.Linear(WIDTH, 3))


class LitSyncBatchNorm(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model[1] = nn.SyncBatchNorm(WIDTH)


class LitGraph(Lit):
    """A module with an example input, from which loggers trace the graph of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(4, WIDTH, dtype=torch.float64)
