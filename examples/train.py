"""Train a model in a pipeline: `python examples/train.py schedule=1f1b trainer.devices=2`.

All settings are in conf/example.yaml, in the folders next to it, and in the configuration of lightning_pipes. `--help`
lists them.
"""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from settings import register

from lightning_pipes import OptunaPruning, PipelineStrategy, TimelineLogger
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.trainer import PipelineReport
from lightning_pipes.tune.messages import plain_errors

READS = {
    "gpt": "stdlib",
    "lora": "stdlib",
    "mlp": "digits",
    "resnet_digits": "digits",
}  # the data that each model can read
UNITS = {"stdlib": "tokens/s", "digits": "images/s"}


class Speed(L.Callback):
    """Measures trained labels per second, including data loading, but without the first step and validation."""

    def __init__(self) -> None:
        self.labels, self.seconds = 0, 0.0
        self._since: float | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: list[torch.Tensor], batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.labels += batch[1].numel()
            self.seconds += now - self._since
        self._since = now

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._since is not None:
            self._since = time.perf_counter()


def check(cfg: DictConfig) -> None:
    """Check for settings that are valid individually but cannot be combined.

    Raises:
        SystemExit: two settings do not fit together.
    """
    chosen = HydraConfig.get().runtime.choices
    model, data = chosen["model"], chosen["data"]
    if READS[model] != data:
        others = [name for name in READS if READS[name] == data]
        raise SystemExit(
            f"model={model} can't read data={data}: choose data={READS[model]}, or model={' or model='.join(others)}"
        )
    if (
        HydraConfig.get().mode == RunMode.MULTIRUN
        and chosen["hydra/launcher"] != "job_array"
        and cfg.trainer.devices != 1
    ):
        raise SystemExit(
            f"--multirun with trainer.devices={cfg.trainer.devices}: every process would name a sweep folder "
            "by the time at which it starts; choose hydra/launcher=job_array, where the runs share one pipeline, or "
            "set trainer.devices=1"
        )


def describe_bubble(report: PipelineReport) -> str:
    """Return a description of the measured bubble, and of the predicted bubble if there is a prediction."""
    if report.bubble_measured is None:
        return "none: this run shared its ranks with other runs"
    predicted = "" if report.bubble_predicted is None else f", {report.bubble_predicted:.1%} predicted before it ran"
    return f"{report.bubble_measured:.1%} measured{predicted}"


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the last checkpoint that an earlier attempt of this run saved, regularly or at the request of SLURM."""
    found = [*directory.glob("checkpoints/last.ckpt"), *directory.glob("hpc_ckpt_*.ckpt")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def attempt(metrics: Path) -> str:
    """Return the subdirectory for the metrics of this attempt, because a logger would delete the metrics of an earlier
    attempt."""
    earlier = len([*metrics.rglob("metrics.csv")])
    return f"restart_{earlier}" if earlier else ""


@hydra.main(version_base="1.3", config_path="conf", config_name="example")
def main(cfg: DictConfig) -> float:
    """Return the validation loss, or the loss of the last batch if there was no validation.

    Other results are printed, or saved in Hydra's output directory.
    """
    check(cfg)
    for noise in (".*does not have many workers.*", ".*LeafSpec.*is deprecated.*"):
        warnings.filterwarnings("ignore", noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    directory = Path(HydraConfig.get().runtime.output_dir)

    L.seed_everything(cfg.seed, verbose=False)
    model = hydra.utils.instantiate(cfg.model, **cfg.optimizer)
    data = hydra.utils.instantiate(cfg.data)
    strategy = PipelineStrategy(
        hydra.utils.instantiate(cfg.schedule),
        **OmegaConf.to_container(cfg.pipeline),  # type: ignore[arg-type]
    )
    checkpoint = ModelCheckpoint(
        directory / "checkpoints",
        filename="{step}-{val_loss:.3f}",
        monitor="val_loss",
        save_last=True,
        enable_version_counter=False,
    )
    speed = Speed()
    bar = [TQDMProgressBar(refresh_rate=5)] if cfg.trainer.enable_progress_bar else []
    save_adapters = getattr(model, "save_adapters", None)  # of model=lora; a checkpoint would contain the whole base
    trainer = L.Trainer(
        strategy=strategy,
        logger=CSVLogger(directory, name="metrics", version=attempt(directory / "metrics")),
        enable_checkpointing=save_adapters is None,
        callbacks=[
            *([checkpoint] if save_adapters is None else []),
            speed,
            TimelineLogger(),
            OptunaPruning("val_loss"),
            *bar,
        ],
        default_root_dir=directory,
        **cfg.trainer,
    )
    before = newest_checkpoint(directory) if cfg.resume else None
    trainer.fit(model, data, ckpt_path=before)
    if "train_loss" not in trainer.callback_metrics:
        raise SystemExit(
            f"{before} has nothing left to train: raise trainer.max_epochs, or choose another hydra.run.dir"
        )

    loss = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        report = strategy.report
        saved = report.save(directory)
        validated = f", validation {loss['val_loss']:.3f}" if "val_loss" in loss else ", not validated"
        print(f"loss        last batch {loss['train_loss']:.3f}{validated}")
        print(f"{UNITS[HydraConfig.get().runtime.choices['data']]:11} {speed.labels / max(speed.seconds, 1e-9):.0f}")
        print(f"step        {seconds_text(report.measured.step)} measured. {report.prediction_text}".rstrip())
        print(f"bubble      {describe_bubble(report)}")
        if save_adapters is None:
            print(f"checkpoint  {checkpoint.best_model_path or 'none: nothing was validated'}")
        else:
            save_adapters(directory / "adapters")
            print(f"adapters    {directory / 'adapters'}")
        print(f"timeline    {saved.picture}")
        print(f"report      {saved.page}")
        print(f"advice      {report.advice.sentence}")
    return loss.get("val_loss", loss["train_loss"])


if __name__ == "__main__":
    register()
    with plain_errors():
        main()
