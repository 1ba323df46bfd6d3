"""The rows of the compatibility table. Rows of other modules are imported at the end."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fsspec import filesystem
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy, consolidate
from tests.compat import models
from tests.compat import modules as m
from tests.compat.registry import ROWS, batches, row
from tests.compat.runs import Found, loaders
from tests.trainer.lit import Lit, LitOutside, LitTied, data, plain_values
from tests.trainers import make_trainer

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "kfkb": {"schedule": "kfkb", "schedule_args": {"k": 2}},
}
BY_UNITS = "1f1b by units"
"""The name of the settings that cut every module by units, including modules with a container of layers."""
SETTINGS: dict[str, dict[str, Any]] = {
    **SCHEDULES,
    BY_UNITS: {"schedule": "1f1b", "module": "", "partition": "parameters"},
}
"""Settings of the strategy by name, for rows that do not have these settings themselves."""


def callback(trainer: pl.Trainer, kind: type[Any]) -> Any:
    return next(c for c in trainer.callbacks if isinstance(c, kind))


def token_loaders() -> dict[str, Any]:
    return batches(DataLoader(data(tokens=True), batch_size=8), token_loader())


def label_loaders() -> dict[str, Any]:
    return batches(DataLoader(models.padded_labels(), batch_size=8), token_loader())


def token_loader() -> DataLoader[Any]:
    return DataLoader(data(13, tokens=True), batch_size=5)


def checkpointing(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"enable_checkpointing": True, "callbacks": [cb.ModelCheckpoint(folder / "kept", **settings)]}


def averaged(folder: Path) -> dict[str, Any]:
    options = checkpointing(folder, save_last=True, save_top_k=-1)
    return {**options, "callbacks": [cb.WeightAveraging(), *options["callbacks"]]}


def pruned(folder: Path) -> dict[str, Any]:
    """Return options that prune half of the remaining weights after each epoch, and reset the weights that are kept."""
    options = checkpointing(folder, save_last=True, save_top_k=-1)
    pruning = cb.ModelPruning("l1_unstructured", amount=0.5, use_global_unstructured=False)
    return {**options, "callbacks": [pruning, *options["callbacks"]]}


def using(make: Any, **options: Any) -> Any:
    """Return a function that returns Trainer options with a callback from `make`."""
    return lambda folder: {"callbacks": [make()], **options}


# ---- Trainer


def shuffled(seed: int | None = 5) -> DataLoader[Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data(), batch_size=8, shuffle=True, generator=generator)


def profiled(trainer: pl.Trainer, folder: Path) -> dict[str, int]:
    """Return the number of calls of each profiled action that every strategy has."""
    counts = {action: len(seconds) for action, seconds in trainer.profiler.recorded_durations.items()}
    shared = ("[LightningModule]", "[Callback]", "run_training_epoch", "run_training_batch", "optimizer_step")
    own = ("setup", "_step", "configure_")  # calls of the strategy, whose number differs between strategies
    return {a: n for a, n in counts.items() if a.startswith(shared) and not any(part in a for part in own)}


def profiling(kind: str, folder: Path) -> dict[str, Any]:
    kinds = {"advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    return {"profiler": kinds[kind](dirpath=folder, filename="profile")}


def traced_ranks(ranks: list[Found], plain: Found) -> None:
    """Assert that each rank's trace names this rank."""
    assert [found["watched"] for found in ranks] == list(range(len(ranks)))


def rank_in_trace(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the rank that this rank's Perfetto trace names."""
    if trainer.world_size == 1:
        return None
    trace = json.loads(next(folder.glob(f"fit-profile-{trainer.global_rank}-*.json")).read_text())
    assert any("training_step" in event.get("name", "") for event in trace["traceEvents"])
    return trace["distributedInfo"]["rank"]


def profile_written(trainer: pl.Trainer, folder: Path) -> bool:
    """Return whether this rank has written a profile that contains its training steps."""
    rank = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
    return "training_step" in (folder / f"fit-profile{rank}.txt").read_text()


def fitted_again(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, **loaders())
    return trainer.global_step, dict(trainer.callback_metrics)


def another_trainer(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    strategy = "auto" if isinstance(trainer.strategy, SingleDeviceStrategy) else PipelineStrategy("gpipe")
    other = make_trainer(devices=trainer.num_devices, strategy=strategy, precision="64-true", max_epochs=1)
    fresh = Lit().double()
    fresh.load_state_dict(module.state_dict())
    other.fit(fresh, **loaders())
    return (
        dict(fresh.state_dict()),
        dict(other.callback_metrics),
        trainer.validate(module, loaders()["val_dataloaders"]),
    )


def tested_best(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    validation = loaders()["val_dataloaders"]
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    tested = trainer.test(dataloaders=validation, ckpt_path="best", weights_only=False)
    path = trainer.checkpoint_callback.best_model_path
    return (
        tested,
        trainer.validate(dataloaders=validation, ckpt_path=path, weights_only=False),
        dict(module.state_dict()),
    )


def predicted_to_a_writer(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    return trainer.predict(module, loaders()["val_dataloaders"], return_predictions=False)


def only_the_first_wrote(ranks: list[Found], plain: Found) -> None:
    """Assert that the first rank of the pipeline has written the predictions of one process, and no other rank any."""
    torch.testing.assert_close(ranks[0]["watched"], plain["watched"], rtol=1e-5, atol=1e-6)
    assert all(found["watched"] == [] for found in ranks[1:])


def loaded_again(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    trainer.save_checkpoint(folder / "saved.ckpt")
    return dict(Lit.load_from_checkpoint(folder / "saved.ckpt").state_dict())


def from_url(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    url = f"file://{folder}/kept.ckpt"
    trainer.save_checkpoint(url)
    kept = torch.load(folder / "kept.ckpt", weights_only=False)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    again = trainer.validate(module, loaders()["val_dataloaders"], ckpt_path=url, weights_only=False)
    return kept["state_dict"], kept["optimizer_states"], again


def in_memory(folder: Path) -> dict[str, Any]:
    return {**checkpointing(folder), "callbacks": [cb.ModelCheckpoint("memory://kept", save_top_k=-1)]}


def saved_in_memory(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the checkpoints in the in-memory file system of rank 0."""
    if not trainer.is_global_zero:
        return None
    store = filesystem("memory")
    found = {}
    for path in store.find("/kept"):
        with store.open(path) as file:
            whole = torch.load(file, weights_only=False)
        found[path] = plain_values({key: whole[key] for key in ("state_dict", "optimizer_states", "global_step")})
    store.rm("/kept", recursive=True)
    return found


def ran(trainer: pl.Trainer, folder: Path) -> list[str] | None:
    """Return the hooks that ran on rank 0."""
    return trainer.lightning_module.ran if trainer.is_global_zero else None


trainer = partial(row, "Trainer")
trainer("gradient_clip_val, norm", {"gradient_clip_val": 0.05}, module=LitOutside)
trainer("gradient_clip_val, value", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, module=LitOutside)
trainer("accumulate_grad_batches", {"accumulate_grad_batches": 2})
trainer("max_steps", {"max_steps": 4, "max_epochs": -1})
trainer("min_epochs, max_epochs", {"min_epochs": 1, "max_epochs": 3})
trainer("max_time", {"max_time": timedelta(hours=1)})
trainer("val_check_interval, share of an epoch", {"val_check_interval": 0.5})
trainer("val_check_interval, batches over epochs", {"val_check_interval": 2, "check_val_every_n_epoch": None})
trainer("check_val_every_n_epoch", {"check_val_every_n_epoch": 2, "max_epochs": 3})
trainer(
    "limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches",
    {"limit_train_batches": 2, "limit_val_batches": 0.7, "limit_test_batches": 1, "limit_predict_batches": 2},
    evaluate=True,
)
trainer("overfit_batches", {"overfit_batches": 2}, loaders=lambda: batches(shuffled()))
trainer("fast_dev_run", {"fast_dev_run": 2}, evaluate=True)
trainer("num_sanity_val_steps", {"num_sanity_val_steps": -1})
trainer("detect_anomaly", {"detect_anomaly": True})
trainer(
    "detect_anomaly, a backward that returns nan",
    {"detect_anomaly": True},
    module=m.LitNan,
    raises="returned nan values",
)
trainer("sync_batchnorm", {"sync_batchnorm": True}, module=m.LitBatchNorm, strategy={"microbatches": 1})
trainer("enable_autolog_hparams=False", {"enable_autolog_hparams": False})
trainer("gradient_clip_val with accumulate_grad_batches", {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3})
trainer("deterministic", {"deterministic": True})
trainer("benchmark", {"benchmark": True})
trainer('profiler="simple"', lambda folder: {"profiler": SimpleProfiler(dirpath=folder)}, watch=profiled)
for name in ("advanced", "pytorch"):
    trainer(f'profiler="{name}"', partial(profiling, name), watch=profile_written)
trainer(
    "PyTorchProfiler, ranks named in its traces",
    lambda folder: {"profiler": PyTorchProfiler(dirpath=folder, filename="profile", export_to_chrome=True)},
    watch=rank_in_trace,
    check=traced_ranks,
    differs=frozenset({"watched"}),
    slow=True,
)
trainer("inference_mode=True", {"inference_mode": True}, module=m.LitInference)
trainer("inference_mode=False", {"inference_mode": False}, module=m.LitInference)
trainer(
    "several validation dataloaders",
    module=m.LitManyLoaders,
    loaders=lambda: batches(val=[DataLoader(data(13), batch_size=5), DataLoader(data(6), batch_size=3)]),
)
trainer("several training dataloaders", module=m.LitTwoLoaders, loaders=lambda: batches(m.two_loaders()))
trainer("IterableDataset without length", loaders=lambda: batches(DataLoader(m.Endless(), batch_size=8)))
trainer("use_distributed_sampler", {"use_distributed_sampler": True}, loaders=lambda: batches(shuffled()))
trainer("user-defined samplers", loaders=lambda: batches(DataLoader(data(), batch_size=4, sampler=m.EverySecond())))
trainer("shuffle=True without a generator", loaders=lambda: batches(shuffled(None)))
trainer("dataloader workers", loaders=lambda: batches(m.with_a_worker()))
trainer(
    "LightningDataModule",
    loaders=lambda: {"datamodule": m.Data()},
    watch=lambda trainer, folder: trainer.datamodule.calls,
)
trainer("a last batch of one sample", loaders=lambda: batches(DataLoader(data(17), batch_size=8)))
trainer(
    "batches that are named tuples of dicts and lists",
    module=m.LitNestedBatch,
    loaders=lambda: batches(m.nested_samples()),
)
trainer("batches that are dataclasses", module=m.LitDataclassBatch, loaders=lambda: batches(m.dataclass_samples()))
trainer("batches that are dicts", module=m.LitDictBatch, loaders=lambda: batches(m.named_samples()))
trainer("fit twice with the same module", then=fitted_again)
trainer("several Trainers one after another", then=another_trainer)
trainer('test(ckpt_path="best"), validate(ckpt_path=...)', partial(checkpointing, monitor="val_loss"), then=tested_best)
trainer(
    "predict(return_predictions=False)",
    using(m.Writer),
    then=predicted_to_a_writer,
    watch=lambda trainer, folder: callback(trainer, m.Writer).given,
    differs=frozenset({"watched"}),
    check=only_the_first_wrote,
)
trainer("save_checkpoint, then load_from_checkpoint", then=loaded_again)
trainer("ckpt_path, resumed", lambda folder: {}, resume=True)
trainer("checkpoints to file:// URLs", then=from_url)
trainer("checkpoints to memory:// URLs", in_memory, watch=saved_in_memory)
trainer(
    "plugins=AsyncCheckpointIO()",
    lambda folder: {**checkpointing(folder, save_last=True), "plugins": [AsyncCheckpointIO()]},
    watch=lambda trainer, folder: saved(trainer, folder),
)
trainer(
    "reload_dataloaders_every_n_epochs",
    {"reload_dataloaders_every_n_epochs": 1},
    module=m.LitReloading,
    loaders=dict,
    watch=lambda trainer, folder: trainer.lightning_module.loaded,
)
trainer(
    "enable_model_summary",
    lambda folder: {"callbacks": [m.Summary()], "enable_model_summary": True},
    watch=lambda trainer, folder: callback(trainer, m.Summary).totals if trainer.is_global_zero else None,
)
trainer("hooks run in the same order", {"enable_checkpointing": True}, module=m.LitHooks, evaluate=True, watch=ran)
trainer(
    "barebones",
    lambda folder: {
        "barebones": True,
        "logger": None,
        "log_every_n_steps": None,
        "num_sanity_val_steps": None,
        "callbacks": [],
    },
)

# ---- precision

ONE = {"microbatches": 1}


def half(folder: Path) -> dict[str, Any]:
    """Return options for training in float16 with a gradient scaler, over four epochs."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "max_epochs": 4}


precision = partial(row, "Precision", module=m.LitFloat)
precision("64-true", {"precision": "64-true"})
precision("32-true", {"precision": "32-true"}, tolerance=1e-5)
for name in ("bf16-mixed", "bf16-true"):
    precision(name, {"precision": name}, strategy=ONE, tolerance=1e-6)
precision(
    "layers of torchao's convert_to_float8_training",
    {"precision": "32-true"},
    module=m.LitFloat8,
    strategy=ONE,
    tolerance=1e-6,
    reason="each micro-batch has separate float8 scales",
    lacks=m.no_torchao,
    slow=True,
)
precision(
    "TransformerEnginePrecision",
    {"precision": None, "plugins": [m.BareTransformerEngine()]},
    refused="TransformerEngine can't be used in a pipeline. Transformer Engine reduces",
    reason="it reduces the largest values over all processes after each layer; use bf16",
)
precision("16-mixed", half, strategy=ONE, tolerance=1e-6, reason="on CPU by plugin, with steps skipped after overflow")

# ---- callbacks


def saved(trainer: pl.Trainer, folder: Path) -> Any:
    """Return all checkpoints of a run by file name, and the best and last checkpoint of each callback."""
    if not trainer.is_global_zero:
        return None
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        file = path
        if path.is_dir():
            file = path.with_suffix(".file")
            consolidate(path, file)
        whole = torch.load(file, map_location="cpu", weights_only=False)
        kept = {
            k: whole.get(k)
            for k in ("global_step", "epoch", "optimizer_states", "lr_schedulers", "current_model_state")
        }
        settings = {k: v for k, v in whole.get("hyper_parameters", {}).items() if not callable(v)}
        kept.update(state_dict=dict(whole["state_dict"]), hyper_parameters=settings)
        found[str(path.relative_to(folder))] = plain_values(kept)
    best = [
        (Path(c.best_model_path).name, Path(c.last_model_path).name, plain_values(c.best_model_score))
        for c in trainer.checkpoint_callbacks
    ]
    assert found
    return found, best


def unfreezing(folder: Path) -> dict[str, Any]:
    unfreeze = cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)
    return {"callbacks": [unfreeze, cb.ModelCheckpoint(folder / "kept", save_top_k=-1)], "enable_checkpointing": True}


def finetuned(trainer: pl.Trainer, module: Any, folder: Path) -> Any:
    """Return the names of the trainable weights, and the state of the finetuning callback."""
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    return trained, callback(trainer, cb.BaseFinetuning).state_dict()


callbacks = partial(row, "Callbacks")
for name, settings in {
    "ModelCheckpoint, monitor and save_top_k": {
        "monitor": "val_loss",
        "save_top_k": 2,
        "filename": "{epoch}-{val_loss:.4f}",
    },
    "ModelCheckpoint, save_last": {"save_last": True},
    "ModelCheckpoint, every_n_train_steps": {"every_n_train_steps": 2, "save_top_k": -1},
    "ModelCheckpoint, save_weights_only": {"save_weights_only": True},
    "ModelCheckpoint, train_time_interval": {"train_time_interval": timedelta(0), "save_top_k": -1},
}.items():
    callbacks(name, partial(checkpointing, **settings), watch=saved)
callbacks(
    "ModelCheckpoint, the default one",
    {"enable_checkpointing": True},
    watch=saved,
)
callbacks(
    "EarlyStopping",
    using(lambda: cb.EarlyStopping("val_loss", patience=1, min_delta=10.0), max_epochs=6),
    watch=lambda trainer, folder: callback(trainer, cb.EarlyStopping).stopped_epoch,
)
callbacks("LearningRateMonitor", using(cb.LearningRateMonitor))
callbacks(
    "StochasticWeightAveraging",
    using(lambda: cb.StochasticWeightAveraging(0.01, swa_epoch_start=1), max_epochs=3),
    module=partial(m.LitWith, lambda module: SGD(module.parameters(), lr=0.3)),
)
callbacks(
    "StochasticWeightAveraging with batch normalization",
    using(lambda: cb.StochasticWeightAveraging(0.01, swa_epoch_start=1), max_epochs=3),
    module=m.LitBatchNorm,
    refused="updates the statistics of batch normalization",
    reason="use WeightAveraging",
)
callbacks("EMAWeightAveraging", using(lambda: cb.EMAWeightAveraging(decay=0.5)))
callbacks("WeightAveraging, and its checkpoints", averaged, watch=saved)
callbacks(
    "DeviceStatsMonitor", using(lambda: cb.DeviceStatsMonitor(cpu_stats=True)), differs=frozenset({"metrics", "logged"})
)
callbacks(
    "BasePredictionWriter",
    using(m.Writer),
    evaluate=True,
    watch=lambda trainer, folder: callback(trainer, m.Writer).given,
    differs=frozenset({"watched"}),
    check=only_the_first_wrote,
)
callbacks("LambdaCallback", using(lambda: cb.LambdaCallback(on_train_batch_end=m.log_lambda)))
callbacks("GradientAccumulationScheduler", using(lambda: cb.GradientAccumulationScheduler({1: 2})))
callbacks("Timer", using(m.StepTimer, max_epochs=9), watch=lambda trainer, folder: trainer.global_step == 4)
callbacks(
    "BaseFinetuning",
    using(m.Thaw),
    module=partial(m.LitWith, lambda module: SGD(m.trainable(module), lr=0.3)),
    then=finetuned,
)
callbacks(
    "BackboneFinetuning, its checkpoints, and a resumed run",
    unfreezing,
    module=m.LitBackbone,
    watch=saved,
    then=finetuned,
    resume=True,
)
callbacks(
    "BatchSizeFinder",
    using(lambda: cb.BatchSizeFinder(max_trials=1, init_val=4)),
    module=m.LitSized,
    loaders=dict,
)
callbacks(
    "LearningRateFinder", using(lambda: cb.LearningRateFinder(num_training_steps=20), max_epochs=8), module=m.LitRate
)
callbacks(
    "LearningRateFinder, when epochs start",
    using(lambda: m.LateFinder(num_training_steps=20), max_epochs=8),
    module=m.LitRate,
)
callbacks(
    "ModelPruning",
    using(lambda: cb.ModelPruning("l1_unstructured", amount=0.5)),
    refused="this one compares the weights of all layers: set use_global_unstructured=False",
    reason="each process holds only its own layers",
)
callbacks(
    "ModelPruning of each layer separately, and its checkpoints",
    pruned,
    module=LitOutside,
    watch=saved,
    then=fitted_again,
)


def bar_on_one(ranks: list[Found], plain: Found) -> None:
    assert "Epoch 0" in ranks[0]["written"]
    assert not any("Epoch 0" in found["written"] for found in ranks[1:])


callbacks(
    "TQDMProgressBar",
    using(m.Bar, enable_progress_bar=True),
    module=m.LitShown,
    watch=lambda trainer, folder: callback(trainer, m.Bar).shown,
    check=bar_on_one,
)


def rich_bar(folder: Path) -> dict[str, Any]:
    return {"callbacks": [cb.RichProgressBar()], "enable_progress_bar": True}


def rich_on_one(ranks: list[Found], plain: Found) -> None:
    assert "Epoch" in ranks[0]["written"]
    assert not any("Epoch" in found["written"] for found in ranks[1:])


callbacks(
    "RichModelSummary",
    using(m.RichSummary, enable_model_summary=True),
    watch=lambda trainer, folder: callback(trainer, m.RichSummary).totals if trainer.is_global_zero else None,
)
callbacks("RichProgressBar", rich_bar, module=m.LitShown, check=rich_on_one)
callbacks("user callbacks that read outputs and callback_metrics", using(m.Reader))


def told(ranks: list[Found], plain: Found) -> None:
    """Assert that the callback got the error on every rank and in the plain run."""
    for found in (*ranks, plain):
        (error,) = found["watched"]
        assert "the second batch is bad" in error


callbacks(
    "user callbacks, on_exception",
    using(m.Mourner),
    module=m.LitRaising,
    raises="the second batch is bad",
    watch=lambda trainer, folder: callback(trainer, m.Mourner).errors,
    check=told,
)

# ---- loggers


def files(trainer: pl.Trainer, folder: Path) -> Any:
    """Return the number of lines in each file that loggers wrote, or None on ranks other than 0."""
    if not trainer.is_global_zero:
        return None
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found[str(path.relative_to(folder))] = path.read_text().count("\n")
    return found


loggers = partial(row, "Loggers")
loggers("CSVLogger, written once", lambda folder: {"logger": CSVLogger(str(folder), name="runs")}, watch=files)
loggers("TensorBoardLogger, written once", m.tensorboard, watch=m.tensorboard_rows)
loggers(
    "TensorBoardLogger(log_graph=True)",
    partial(m.tensorboard, log_graph=True),
    module=m.LitGraph,
    watch=m.tensorboard_graph,
)
loggers("logger=False", {"logger": False})
loggers("MLFlowLogger, without a server", m.mlflow, watch=m.mlflow_rows, lacks=partial(m.lacks, "mlflow"), slow=True)
loggers("WandbLogger, offline", m.wandb, watch=m.wandb_rows, lacks=partial(m.lacks, "wandb"), slow=True)
loggers(
    "several loggers",
    lambda folder: {"logger": [CSVLogger(str(folder), "a"), CSVLogger(str(folder), "b")]},
    watch=files,
)

# ---- optimizers


def configured(configure: Any) -> Any:
    """Return a function that creates a module with the optimizers from `configure`."""
    return partial(m.LitWith, configure)


def by_depth(module: Any) -> Any:
    early = [p for n, p in module.named_parameters() if n.startswith(("model.0", "model.2"))]
    late = [p for n, p in module.named_parameters() if not n.startswith(("model.0", "model.2"))]
    return AdamW([{"params": early, "lr": 0.01, "name": "early"}, {"params": late, "lr": 0.05, "name": "late"}])


def decayed(module: Any) -> Any:
    rest = [p for n, p in module.named_parameters() if not n.endswith("weight")]
    decay = [p for n, p in module.named_parameters() if n.endswith("weight")]
    return AdamW([{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=0.05)


def with_scheduler(make: Any, **config: Any) -> Any:
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return configured(configure)


def two_schedulers(module: Any) -> Any:
    optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}, ExponentialLR(optimizer, 0.9)]


optimizers = partial(row, "Optimizers")
watched = {"trainer": partial(checkpointing, save_last=True), "watch": saved}
optimizers(
    "parameter groups with separate names and learning rates",
    lambda folder: {
        **checkpointing(folder),
        "callbacks": [*checkpointing(folder)["callbacks"], cb.LearningRateMonitor()],
    },
    module=configured(by_depth),
    watch=saved,
)
optimizers("weight decay by a filter on named_parameters", module=configured(decayed), **watched)
optimizers(
    "optimizers made from named_parameters",
    module=configured(lambda module: AdamW(module.named_parameters(), lr=0.05)),
    **watched,
)
optimizers(
    "SGD with momentum", module=configured(lambda module: SGD(module.parameters(), lr=0.3, momentum=0.9)), **watched
)
optimizers("frozen parameters", module=m.LitFrozen, **watched)
optimizers(
    "learning rate scheduler, every step",
    module=with_scheduler(lambda o: StepLR(o, 2, 0.5), interval="step"),
    **watched,
)
optimizers(
    "learning rate scheduler, every epoch", {"max_epochs": 3}, module=with_scheduler(lambda o: ExponentialLR(o, 0.5))
)
optimizers(
    "learning rate scheduler, monitored metric",
    {"max_epochs": 4},
    module=with_scheduler(
        lambda o: ReduceLROnPlateau(o, patience=0, threshold=10.0, threshold_mode="abs"), monitor="val_loss"
    ),
)
optimizers("OneCycleLR, total steps from the Trainer", module=m.LitOneCycle)
optimizers("configure_gradient_clipping overridden", module=m.LitOwnClipping)
optimizers("optimizer_step overridden", module=m.LitWarmUp)
optimizers("optimizer_zero_grad, lr_scheduler_step overridden", {"accumulate_grad_batches": 2}, module=m.LitOwnSteps)
optimizers("several learning rate schedulers", module=configured(two_schedulers))
optimizers(
    "learning rate scheduler, metric that is missing with strict=False",
    module=with_scheduler(ReduceLROnPlateau, monitor="nothing", strict=False),
)
optimizers("sparse gradients of a layer", module=m.sparse_embedding, loaders=token_loaders)
optimizers(
    "sparse gradients with momentum, sparse matrices in attributes",
    module=m.LitSparseMomentum,
    loaders=token_loaders,
    resume=True,
)
optimizers(
    "sparse gradients of an embedding outside of the container",
    module=m.LitSparseOutside,
    loaders=token_loaders,
    refused="Gradients that are summed over ranks must be dense",
    reason="several ranks hold it and sum its gradient, as with data_parallel; use sparse=False",
)
optimizers(
    "grad_norm logged in on_before_optimizer_step",
    module=m.LitNorms,
)
optimizers(
    "grad_norm logged by a callback",
    using(m.Norms, gradient_clip_val=0.05, accumulate_grad_batches=2),
    module=LitOutside,
)
optimizers(
    "several optimizers",
    module=configured(
        lambda module: [SGD(module.model[:2].parameters(), lr=0.1), SGD(module.model[2:].parameters(), lr=0.1)]
    ),
    refused="multiple optimizers",
    reason="Lightning only allows several with manual optimization",
)
optimizers(
    "LBFGS",
    module=configured(lambda module: torch.optim.LBFGS(module.parameters())),
    refused="LBFGS runs training_step several times per update",
    reason="it runs the step several times per update",
)
optimizers(
    "manual optimization",
    module=m.LitManual,
    strategy=ONE,
    evaluate=True,
    resume=True,
)

# ---- the model


def printed_on_one(ranks: list[Found], plain: Found) -> None:
    assert "the epoch has ended" in ranks[0]["written"]
    assert not any("the epoch has ended" in found["written"] for found in ranks[1:])


model = partial(row, "Model")
model("torchmetrics in the module", evaluate=True)
model("parameters outside the pipelined module", module=LitOutside, evaluate=True)
model("tied embeddings", module=LitTied, loaders=token_loaders)
model('module="path"', module=m.LitNested, strategy={"module": "model.layers"})
model("tuples between layers", module=m.LitTuple)
model("dicts between layers", module=m.LitDict)
model(
    "nn.ModuleList, run in a loop with masks and keyword arguments",
    module=models.LitList,
    evaluate=True,
    reason="the largest one is found automatically",
)
model(
    "nn.ModuleList, other arguments for each layer, slices and indices",
    module=models.LitIndexed,
    strategy={"module": "layers"},
)
model(
    "nn.ModuleList, layers that return tuples, skips in the loop",
    module=models.LitUnpacked,
    strategy={"module": "layers"},
    evaluate=True,
)
model(
    "nn.ModuleList, operations between its layers",
    module=models.LitBetween,
    evaluate=True,
    reason="cut by units",
)
for name, kind, path in (
    ("GPT-2", models.LitGPT2, "net.transformer.h"),
    ("BERT", models.LitBert, "net.bert.encoder.layer"),
    ("Llama", models.LitLlama, "net.model.layers"),
    ("T5, its encoder", models.LitT5, "net.encoder.block"),
):
    model(
        f"Hugging Face {name}",
        module=kind,
        loaders=token_loaders,
        strategy={"module": path},
        evaluate=True,
        evaluate_on=token_loader,
        reason=f'`module="{path}"`',
    )
for name, kind, adapter in (
    *(("Llama", models.LitLlama, adapter) for adapter in ("LoRA", "DoRA", "IA3")),
    ("GPT-2", models.LitGPT2, "LoRA"),
):
    model(
        f"Hugging Face {name} with peft's {adapter}",
        module=partial(models.add_adapter, kind, adapter),
        loaders=token_loaders,
        evaluate=True,
        evaluate_on=token_loader,
        then=models.adapter_saved,
        lacks=models.no_peft,
        slow=True,
    )
model(
    "Hugging Face Llama with flex attention and a BlockMask that the model creates",
    module=models.LitFlex,
    loaders=token_loaders,
    evaluate=True,
    evaluate_on=token_loader,
    reason="cut by units: each stage creates the mask",
)
model(
    "Hugging Face Llama with flex attention, named container",
    module=models.LitFlex,
    loaders=token_loaders,
    strategy={"module": "net.model.layers"},
    refused="holds a BlockMask; stages can send each other tensors",
    reason='a mask contains code, which is not sent between ranks; remove `module`, or set `module=""`',
)
model(
    "Hugging Face, use_cache=True, the default of decoders",
    module=partial(models.LitGPT2, use_cache=True),
    loaders=token_loaders,
    evaluate=True,
    evaluate_on=token_loader,
    then=lambda trainer, module, folder: module.net.config.use_cache,
    reason="disabled while steps run in the pipeline, with a log message",
)
model(
    "Hugging Face, use_cache=True set by the step",
    module=models.LitCaching,
    loaders=token_loaders,
    reason="cut by units",
)
model("Hugging Face, gradient_checkpointing_enable()", module=models.LitCheckpointed, loaders=token_loaders)
model(
    "Hugging Face Mixtral, losses of routers (output_router_logits)",
    module=models.LitRouted,
    loaders=token_loaders,
    strategy=ONE,
    reason="cut by units",
)
model(
    "Hugging Face Mixtral, losses of routers, in micro-batches",
    module=models.LitRouted,
    loaders=token_loaders,
    reason="they are not a mean over samples, and are computed once for the whole batch",
    slow=True,
)
model("losses that layers keep, such as losses of routers, added by the step", module=models.LitExperts)
for name, kind, reason in (
    ("padded labels (-100)", models.LitPaddedLabels, "weighted by the number of labels, shifted by one as in the loss"),
    ("sums", models.LitSummedLabels, "summed like the loss"),
    ("a weight that the module returns", models.LitWeighs, "weighted by `microbatch_weight(batch)`"),
):
    model(
        f"losses that are not a mean over samples: {name}",
        module=kind,
        loaders=label_loaders,
        tolerance=1e-5 if kind is models.LitPaddedLabels else 1e-10,  # the library's loss is in single precision
        reason=reason,
    )
for name, kind, reason in (
    (
        "padded labels (-100)",
        models.LitPaddedLabels,
        "weighted by the number of labels, by a test with the first samples",
    ),
    ("sums", models.LitSummedLabels, "summed, by a test with the first samples"),
):
    model(
        f"a module cut by units: {name}",
        module=kind,
        loaders=label_loaders,
        strategy={"module": ""},
        tolerance=1e-5 if kind is models.LitPaddedLabels else 1e-10,
        reason=reason,
    )
model(
    "a module cut by units: a weight that the module returns",
    module=models.LitWeighs,
    loaders=label_loaders,
    strategy={"module": ""},
)
model(
    "Hugging Face, output_hidden_states",
    module=partial(models.LitGPT2, output_hidden_states=True),
    loaders=token_loaders,
    strategy={"module": "net.transformer.h"},
    refused="set output_hidden_states=False",
    reason="the layers are on several ranks",
)
model("GroupNorm", module=m.LitNorm)
model(
    "BatchNorm",
    module=m.LitBatchNorm,
    strategy=ONE,
    reason="each micro-batch is normalized separately, and a warning reports this",
)
model(
    "SyncBatchNorm",
    module=m.LitSyncBatchNorm,
    refused="is a SyncBatchNorm, which would wait for ranks that hold other layers",
    reason="it would wait for ranks that hold other layers; use BatchNorm",
)
model("weight_norm, orthogonal, register_parametrization", module=m.LitParametrized)
model("spectral_norm", module=m.LitSpectral, strategy=ONE, reason="it iterates once for every micro-batch")
model("nn.Embedding(max_norm=...)", module=m.bounded_embedding, loaders=token_loaders)
model("lazy layers after a first forward", module=m.LitLazy)
model("complex numbers between layers", module=m.LitComplex)
model("torch.utils.checkpoint in layers", module=m.LitCheckpointed)
model("batch transfer hooks overridden, including random ones", module=m.LitTransfers, evaluate=True)
model("configure_callbacks", {"max_epochs": 6}, module=m.LitBringsCallbacks)
model("optimizers(), lr_schedulers(), all_gather, print, strategy.reduce", module=m.LitAsks, check=printed_on_one)
model(
    "losses kept in a list by training_step, read in on_train_epoch_end",
    module=m.LitCollects,
)
model("on_train_batch_start that returns -1", module=m.LitSkipsAnEpoch)
model("configure_model", module=m.LitConfigured)
model(
    "self.log(..., sync_dist=True)",
    module=m.LitSynced,
    reason='values that are logged with reduce_fx="sum" must be sums over samples, not means',
)
model(
    "training_step that returns None",
    module=m.LitSkipping,
    refused="training_step returned no loss",
    reason="every stage waits for the gradient of every batch; return zero times the loss",
)
model("recompute=True", strategy={"recompute": True})
model(
    "save_hyperparameters, with a module among the arguments",
    partial(checkpointing, save_last=True),
    module=m.LitOfNet.of_layers,
    watch=saved,
    then=m.LitOfNet.load_last,
)
model(
    "torch.compile of the LightningModule",
    module=lambda: m.compiled(Lit()),
    refused="incompatible with the current strategy",
    reason="Lightning only allows it with its own strategies; compile the layers",
)


def all_compiled(ranks: list[Found]) -> None:
    assert all(found["watched"] for found in ranks)


model("torch.compile of layers", module=m.LitCompiled, reason='backend="eager"')
model(
    "torch.compile of layers, compiled to machine code",
    m.inducing,
    module=m.LitInductor,
    watch=m.induced,
    check=lambda ranks, plain: all_compiled(ranks),
    lacks=m.no_compiler,
    slow=True,
    reason='backend="inductor"',
)
model("layer.compile() in configure_model", module=models.LitCompiledList)
model(
    "torch.compile of the pipelined module",
    module=models.LitCompiledWhole,
    refused="is compiled as a whole",
    reason="each rank holds only some of its layers; compile the layers",
)
model("skip connections between distant layers, in dicts", module=models.LitUNet)
model(
    "skip connections through an object that layers share",
    module=models.LitHiddenSkip,
    refused="Pass the tensor along: let layers take and return tuples or dicts",
    reason="each process has its own copy of the object; pass tuples or dicts",
)
model("objects and modules that several layers share, without passing tensors", module=models.LitShared, evaluate=True)
model(
    "several calls of the pipelined module in a step",
    module=m.LitTwice,
    reason="cut by units",
)

# ---- the strategy

strategy = partial(row, "Strategy")
for name in ("pipeline_1f1b", "pipeline_kfkb", "pipeline_gpipe"):
    strategy(f'strategy="{name}"', strategy=name)

strategy(
    'checkpoint="sharded"', partial(checkpointing, save_last=True), strategy={"checkpoint": "sharded"}, watch=saved
)
strategy('checkpoint="sharded", ckpt_path', lambda folder: {}, strategy={"checkpoint": "sharded"}, resume=True)
replicated = partial(
    strategy, trainer=partial(checkpointing, save_last=True), loaders=dict, differs=frozenset({"outputs"}), watch=saved
)
replicated(
    "data_parallel=2, shard_optimizer=True",
    module=models.LitReplicas,
    strategy={"data_parallel": 2, "shard_optimizer": True},
)
replicated(
    "fully_shard (FSDP2) of the layers of each stage",
    module=models.LitFullySharded,
    strategy={"data_parallel": 2, "partition": "parameters"},
    differs=frozenset({"outputs", "weights"}),
    reason="weights are compared in checkpoints",
)
strategy(
    "async_checkpoint=True",
    partial(checkpointing, save_last=True, every_n_train_steps=2),
    strategy={"async_checkpoint": True},
    watch=saved,
)


def reported(ranks: list[Found], plain: Found) -> None:
    assert all(0 <= found["watched"] < 1 for found in ranks)


strategy(
    "strategy.report after fit",
    watch=lambda trainer, folder: getattr(trainer.strategy, "report", None) and trainer.strategy.report.bubble_measured,
    differs=frozenset({"watched"}),
    check=reported,
)

# ---- rows of other modules

from tests.compat import (  # noqa: E402
    found_rows,
    gradient_rows,
    state_rows,
    step_rows,
    stream_rows,
    supernet_rows,
    type_rows,
    unusual_rows,
)

__all__ = [
    "ROWS",
    "SCHEDULES",
    "found_rows",
    "gradient_rows",
    "state_rows",
    "step_rows",
    "stream_rows",
    "supernet_rows",
    "type_rows",
    "unusual_rows",
]
