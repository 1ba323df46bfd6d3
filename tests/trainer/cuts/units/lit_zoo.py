"""The plain modules of the zoo as LightningModules, trained with and without a pipeline."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.trainer.cuts.units.trace import map_leaves, tensors_of
from tests.trainer.cuts.units.library_zoo import FLOAT32, HUGGING_FACE, SUMMED, VISION
from tests.trainer.cuts.units.zoo import CASES
from tests.trainer.lit import plain_values, quiet

CUT = {"module": "", "microbatches": 2}
"""Settings of modules whose loss is a mean over independent samples."""
CHOSEN = ("nine linears", "siamese", "dense skips in a dataclass", "autograd.Function and complex numbers")
CHOSEN += ("graph network", "mixtral router loss")
"""Cases for which the strategy must choose to cut units without being told."""
WHOLE = {"module": "", "microbatches": 1}
"""Settings of modules with batch normalization, or with a loss that is not a mean over samples."""
ALL = CASES | HUGGING_FACE | VISION
BY_BATCH = (
    *("u-net", "resnet by hand", ".item() control flow", "parametrizations", "train mode mix", "graph network"),
    "things left behind",
    *FLOAT32,
    *SUMMED,
    *VISION,
)


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of the strategy for a case."""
    settings = WHOLE if name in BY_BATCH else CUT
    return {key: value for key, value in settings.items() if key != "module" or name not in CHOSEN}


def draws(name: str) -> bool:
    """Return whether the loss of a case depends on random numbers, which plain Lightning draws from one stream."""
    losses = []
    for seed in range(2):
        case = ALL[name]()
        torch.manual_seed(seed)
        losses.append(float(case.step(case.model, case.batch).detach()))
    return losses[0] != losses[1]


class Samples(Dataset[Any]):
    """The samples of two batches: the batch of a case, and a batch with other values."""

    def __init__(self, name: str) -> None:
        self._batch = ALL[name]().batch
        self.rows = len(tensors_of(self._batch)[0])

    def __len__(self) -> int:
        return 2 * self.rows

    def __getitem__(self, number: int) -> Any:
        def sample(tensor: torch.Tensor) -> torch.Tensor:
            values = tensor.flip(-1) if number >= self.rows and tensor.ndim > 1 else tensor
            return values[number % self.rows]

        return map_leaves(self._batch, sample)


class Batches(Dataset[Any]):
    """The same two batches as a whole, for cases whose batches do not consist of samples."""

    def __init__(self, name: str) -> None:
        self._batch = ALL[name]().batch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return map_leaves(self._batch, lambda t: t.flip(-1) if number and t.ndim > 1 else t)


def loader_of(name: str) -> DataLoader[Any]:
    """Return the data of a case."""
    if name == "graph network":
        return DataLoader(Batches(name), batch_size=None)
    data = Samples(name)
    return DataLoader(data, batch_size=data.rows)


class LitZoo(pl.LightningModule):
    """A case of the zoo as a LightningModule that logs its loss and validates."""

    def __init__(self, name: str) -> None:
        super().__init__()
        case = ALL[name]()
        self.net, self.run_case = case.model, case.step
        self.is_large = name in VISION

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.run_case(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.run_case(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.is_large:  # saves three copies of the weights on each rank
            return torch.optim.SGD(self.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Keeps(pl.Callback):
    """Records the loss of each batch, and the names of the weights on this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.here: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.here = [name for name, p in trainer.lightning_module.named_parameters() if not p.is_meta]


def train_zoo(name: str, ranks: int, folder: str, **settings: Any) -> dict[str, Any]:
    """Train a case for two epochs of two batches, and return the results. With 0 ranks, train in plain Lightning."""
    quiet()
    torch.set_num_threads(1)
    loader = loader_of(name)
    keeps = Keeps()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks or 1,
        strategy=PipelineStrategy(**settings) if ranks else "auto",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[keeps],
        default_root_dir=folder,
    )
    torch.manual_seed(0)
    module = LitZoo(name)
    trainer.fit(module, loader, loader)
    path = f"{folder}/{''.join(filter(str.isalnum, name))}_{ranks}.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True) if trainer.is_global_zero else {}
    trainer.strategy.barrier()
    Path(path).unlink(missing_ok=True)
    return {
        "losses": keeps.losses,
        "here": keeps.here,
        "val": float(trainer.callback_metrics["val"]),
        "weights": plain_values(module.state_dict()),
        "saved": plain_values(state.get("state_dict", {})),
        "optimizer": plain_values([o["state"] for o in state.get("optimizer_states", [])]),
    }


def train_many(rank: int, cases: list[tuple[str, dict[str, Any]]], ranks: int, folder: str) -> list[str]:
    """Train cases one after another on this rank, each with its settings, and return files for `read_result`."""
    paths = []
    for number, (name, settings) in enumerate(cases):
        paths.append(f"{folder}/{ranks}_{rank}_{number}.pickle")
        Path(paths[-1]).write_bytes(pickle.dumps(train_zoo(name, ranks, folder, **settings)))
    return paths


def read_result(path: str) -> dict[str, Any]:
    """Return the result of a training from its file, and remove the file."""
    found: dict[str, Any] = pickle.loads(Path(path).read_bytes())
    Path(path).unlink()
    return found
