"""A small training, job array or study, run as a script by ranks into which `benchmarks/faults.py` injects faults.

The job is described by an environment variable. The script continues from the checkpoints that it finds, as a user's
script does.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import optuna
    import torch

VARIABLE = "FAULT_JOB"
"""The environment variable that contains a `Job` as JSON."""
EPOCHS, STEPS, ROWS, WIDTH, BLOCKS = 4, 6, 16, 16, 8
RATES = (1e-2, 2e-2, 5e-3, 1e-3)
"""Learning rates. A single training uses the first one; each sibling and each trial uses its own."""
_trained: list[str] = []
"""The names of the trainings that have ended in this process."""


@dataclass(frozen=True)
class Job:
    """The settings of a job.

    Attributes:
        folder: the folder for checkpoints, digests of weights, marks and the output of the ranks.
        kind: "fit", "array" or "study".
        form: the form of the checkpoints: "full", "sharded", "async" or "sharded async".
        ranks: the number of ranks.
        heartbeat: the strategy's `heartbeat_timeout`, in seconds.
        timeout: the strategy's `timeout`, in seconds, which limits all other waiting between ranks.
    """

    folder: str
    kind: str
    form: str
    ranks: int
    heartbeat: float
    timeout: float

    def environment(self) -> dict[str, str]:
        """Return the environment variables that describe this job to its ranks."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def trainings(self) -> int:
        """The number of trainings in the job."""
        return 1 if self.kind == "fit" else len(RATES)

    def mark(self, name: str, rank: int) -> Path:
        """Return the path of the file that a rank creates when it first reaches the place `name`.

        The file contains the time.
        """
        return Path(self.folder, f"{name}.{rank}.mark")

    def said(self, rank: int) -> Path:
        """Return the path of the file with the output of a rank."""
        return Path(self.folder, f"rank{rank}.said")

    def weights(self) -> dict[str, str]:
        """Return the digest of the final weights of each training, by file name."""
        return {path.name: path.read_text() for path in Path(self.folder).glob("*.weights")}


def own_rank() -> int:
    """Return the rank of this process, according to its environment."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def mark(job: Job, name: str) -> None:
    """Record that this rank has reached the place `name`.

    Only the first time is recorded. If an earlier attempt has already reached the place, its time is kept.
    """
    path = job.mark(name, own_rank())
    if not path.exists():
        path.with_suffix(".new").write_text(str(time.monotonic()))
        path.with_suffix(".new").rename(path)


def work(job: Job) -> None:
    """Run the whole job on this rank."""
    import optuna

    from lightning_pipes import JobArray, optimize_array

    if job.kind == "fit":
        train(job, "fit", RATES[0])
        return
    if job.kind == "array":
        trainings = [partial(train, job, f"sibling{n}", RATES[n]) for n in range(len(RATES))]
        for outcome in JobArray[float](2, progress=False).run(trainings):
            if outcome.error is not None:
                raise outcome.error
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    left = len(RATES)
    if own_rank() == 0:
        left -= len(study(job).get_trials(states=[optuna.trial.TrialState.COMPLETE]))
    optimize_array(partial(study, job), partial(objective, job), n_trials=left, array_size=2)


def study(job: Job) -> optuna.Study:
    """Return the study of the job, with one queued trial for each learning rate that has no trial yet."""
    import optuna

    storage = f"sqlite:///{Path(job.folder, 'study.db')}"
    made = optuna.create_study(storage=storage, study_name="rates", load_if_exists=True)
    for rate in RATES[len(made.trials) :] if len(made.trials) < len(RATES) else ():
        made.enqueue_trial({"rate": rate})
    return made


def objective(job: Job, trial: Any) -> float:
    """Train with the learning rate of a trial, and return the final loss."""
    rate = trial.suggest_float("rate", 1e-4, 1e-1)
    return train(job, f"trial{rate}", rate)


def train(job: Job, name: str, rate: float) -> float:
    """Train a small network with dropout, and return the final loss.

    Training continues from the last checkpoint in the training's folder if there is one. Rank 0 saves a digest of the
    final weights.

    Args:
        job: the job.
        name: the name of the training and of its folder.
        rate: the learning rate.
    """
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_pipes import PipelineStrategy

    folder = Path(job.folder, name)

    class Marks(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            mark(job, "connected")

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            mark(job, "training")

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            _trained.append(name)
            if len(_trained) == job.trainings:
                mark(job, "trained")

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", job.ranks)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=PipelineStrategy(
            microbatches=4,
            partition="parameters",
            seed=3,
            checkpoint="sharded" if "sharded" in job.form else "full",
            async_checkpoint="async" in job.form,
            heartbeat_timeout=job.heartbeat,
            timeout=timedelta(seconds=job.timeout),
        ),
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, filename="last", enable_version_counter=False), Marks()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    net = network(rate)
    last = folder / "last.ckpt"
    batches = torch.utils.data.DataLoader(pairs(0, STEPS * ROWS), batch_size=ROWS)
    trainer.fit(
        net,
        batches,
        torch.utils.data.DataLoader(pairs(1, ROWS), batch_size=ROWS),
        ckpt_path=str(last) if last.exists() else None,
        weights_only=False,
    )
    if trainer.is_global_zero:
        Path(job.folder, f"{name}.weights").write_text(digest(net))
    return float(trainer.callback_metrics.get("train_loss", 0.0))  # no loss if it was complete before


def network(rate: float) -> pl.LightningModule:
    """Return the module to train, with the same initial weights in every process."""
    import lightning.pytorch as pl
    import torch
    from torch import nn

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(BLOCKS)]
            self.layers = nn.Sequential(*blocks)

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = ((self.layers(batch[0]) - batch[1]) ** 2).mean()
            return loss

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=rate)

    return Net()


def pairs(seed: int, rows: int) -> torch.utils.data.TensorDataset:
    """Return a data set of random inputs and targets, of shape (rows, WIDTH) each."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.TensorDataset(*torch.randn(2, rows, WIDTH, generator=generator))


def digest(net: pl.LightningModule) -> str:
    """Return the SHA-256 digest of the names and bytes of all weights."""
    import hashlib

    found = hashlib.sha256()
    for key, value in net.state_dict().items():
        found.update(key.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def again(rank: int, job: Job) -> None:
    """Run the job in the calling process, without its log output. No fault is injected.

    Args:
        rank: the rank of this process. It is not used, because it is also in the environment.
        job: the job.
    """
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    work(job)


def main() -> None:
    """Run the job of the environment variable on this rank, and write all output to a file in the job's folder."""
    job = Job(**json.loads(os.environ[VARIABLE]))
    said = os.open(job.said(own_rank()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    mark(job, "born")
    import faulthandler

    faulthandler.enable()  # a rank that does not end is sent SIGABRT, and then prints its stack
    import lightning.pytorch  # noqa: F401

    import lightning_pipes  # noqa: F401

    mark(job, "imported")
    work(job)
    mark(job, "ended")


if __name__ == "__main__":
    main()
