"""A small training, job array or study, run as a script by its ranks, which come to harm in it: see faults.py.

What it is to do is in its environment. It goes on from the checkpoints that it finds, as a user's script does.
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
"""In the environment: a `Job`."""
EPOCHS, STEPS, ROWS, WIDTH, BLOCKS = 4, 6, 16, 16, 8
RATES = (1e-2, 2e-2, 5e-3, 1e-3)
"""Learning rates: of a training the first one, of siblings and trials one each."""
_trained: list[str] = []
"""The trainings of this process that have come to their end."""


@dataclass(frozen=True)
class Job:
    """What the ranks are to do.

    Attributes:
        folder: for checkpoints, weights and what else there is to tell.
        kind: "fit", "array" or "study".
        form: of checkpoints: "full" or "sharded", "async" or "sharded async".
        heartbeat: seconds of `heartbeat_timeout`.
        timeout: seconds that ranks wait for each other otherwise.
    """

    folder: str
    kind: str
    form: str
    ranks: int
    heartbeat: float
    timeout: float

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def trainings(self) -> int:
        """So many in all."""
        return 1 if self.kind == "fit" else len(RATES)

    def mark(self, name: str, rank: int) -> Path:
        """A file that is there from the moment on at which a rank comes to a place; it holds the time."""
        return Path(self.folder, f"{name}.{rank}.mark")

    def said(self, rank: int) -> Path:
        """What a rank has printed."""
        return Path(self.folder, f"rank{rank}.said")

    def weights(self) -> dict[str, str]:
        """A digest of the weights in the end of each training, by its name."""
        return {path.name: path.read_text() for path in Path(self.folder).glob("*.weights")}


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def mark(job: Job, name: str) -> None:
    """The first time counts, unless another attempt has come to it before."""
    path = job.mark(name, own_rank())
    if not path.exists():
        path.with_suffix(".new").write_text(str(time.monotonic()))
        path.with_suffix(".new").rename(path)


def work(job: Job) -> None:
    """Does it all, on this rank."""
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
    import optuna

    storage = f"sqlite:///{Path(job.folder, 'study.db')}"
    made = optuna.create_study(storage=storage, study_name="rates", load_if_exists=True)
    for rate in RATES[len(made.trials) :] if len(made.trials) < len(RATES) else ():
        made.enqueue_trial({"rate": rate})
    return made


def objective(job: Job, trial: Any) -> float:
    rate = trial.suggest_float("rate", 1e-4, 1e-1)
    return train(job, f"trial{rate}", rate)


def train(job: Job, name: str, rate: float) -> float:
    """One training of a small network with dropout; the loss in the end."""
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
    return float(trainer.callback_metrics.get("train_loss", 0.0))  # none where it was through before


def network(rate: float) -> pl.LightningModule:
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
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.TensorDataset(*torch.randn(2, rows, WIDTH, generator=generator))


def digest(net: pl.LightningModule) -> str:
    """Of all bits of all weights."""
    import hashlib

    found = hashlib.sha256()
    for key, value in net.state_dict().items():
        found.update(key.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def again(rank: int, job: Job) -> None:
    """The same in processes that are there already, for what nothing happens to."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    work(job)


def main() -> None:
    job = Job(**json.loads(os.environ[VARIABLE]))
    said = os.open(job.said(own_rank()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    mark(job, "born")
    import faulthandler

    faulthandler.enable()  # who is still there is ended by SIGABRT, and says where it was
    import lightning.pytorch  # noqa: F401

    import lightning_pipes  # noqa: F401

    mark(job, "imported")
    work(job)
    mark(job, "ended")


if __name__ == "__main__":
    main()
