"""Tests of the Trainer's features around steps for modules that are cut by units, on two processes and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from lightning_pipes.trainer.plan.settings import PLAN_VARIABLE
from lightning_pipes.trainer.setup import unit_setup
from tests.trainer.lit import WIDTH, data, differences, plain_values, quiet
from tests.trainers import make_trainer


class ByHand(pl.LightningModule):
    """Layers without a container, two of which share a weight. The module logs in every hook that allows it."""

    def __init__(self, scheduler: str = "", frozen: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        for n in range(1, 6):
            setattr(self, f"fc{n}", nn.Linear(WIDTH, WIDTH))
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back.weight = self.fc1.weight
        self.head = nn.Linear(WIDTH, 3)
        self.seen: list[torch.Tensor] = []
        if frozen:
            self.fc2.requires_grad_(False)
            self.fc5.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.fc1(x)
        x = self.fc3(self.fc2(skip).tanh()).relu()
        x = self.fc5(self.fc4(x).tanh() + skip)
        return self.head(self.back(x.tanh()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("right", (logits.argmax(1) == y).double().sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", logits.detach().max(), reduce_fx="max")
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("twice", outputs["twice"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val", F.cross_entropy(logits, batch[1]))
        self.seen.append(logits)

    def on_validation_epoch_end(self) -> None:
        self.log("norm", torch.cat(self.seen).norm())
        self.seen.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2 and p.requires_grad]
        vectors = [p for p in self.parameters() if p.ndim < 2 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        if self.hparams.scheduler == "step":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        if self.hparams.scheduler == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=9.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        return optimizer


class Hooked(ByHand):
    """Hooks that change each weight, and hooks that read all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.ModuleDict({f"fc{n}": nn.Linear(WIDTH, WIDTH) for n in (1, 2)}).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.slow["fc2"](self.slow["fc1"](x).tanh())
        return super().forward(x + target)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.99)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.log("gradients", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log("weights", float(sum(p.numel() for p in self.parameters())))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        with torch.no_grad():
            for name, slow in self.slow.items():
                for old, new in zip(slow.parameters(), self.get_submodule(name).parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)


class Skips(ByHand):
    """Skips the first batch of a window, the second batch of another, and a whole window.

    In skipped batches, the computed values are NaN.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) in ((0, 1), (1, 0), (2, 0), (2, 1)):
            self.log("skipped", (self(batch[0] / 0).argmax(1) >= 0).double().sum(), reduce_fx="sum")
            return None
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("twice", outputs["twice"] if outputs else 0.0)


class Compares(ByHand):
    """A loss that contrasts each sample with all others of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = F.normalize(self(batch[0]), dim=1)
        alike = x @ x.T
        loss = F.cross_entropy(alike / 0.5, torch.arange(len(x))) + 0.1 * x.sum(0).norm()
        self.log("largest", alike.max(), reduce_fx="max")
        return {"loss": loss, "twice": 2 * loss.detach()}


class Masks(ByHand):
    """A mean over the samples that the step selects."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), torch.where(x[:, 0] > 0, y, -100))
        return {"loss": loss, "twice": 2 * loss.detach()}


class Centres(ByHand):
    """A module whose samples depend on each other in the first stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        return super().forward(x - x.mean(0))


class Growing(nn.Module):
    """A layer that reads the buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 0.1 * self.calls)
        self.calls += 1
        return x


class Normed(ByHand):
    """A module with running statistics on both stages, which changes its batch in place."""

    def __init__(self, scheduler: str = "", frozen: bool = False) -> None:
        super().__init__(scheduler, frozen)
        self.norm1, self.norm2, self.growing = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), Growing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(0.5)
        skip = self.growing(self.norm1(self.fc1(x)))
        x = self.fc3(self.fc2(skip).tanh()).relu_()
        return self.head(self.norm2(self.fc5(self.fc4(x).tanh() + skip)))


class Keeps(pl.Callback):
    """Records the logged values and the learning rates of each step."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.steps.append((plain_values(dict(trainer.callback_metrics)), rates))


class Freezes(pl.Callback):
    """Freezes layers of both stages during training."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            module.fc2.requires_grad_(False)
            module.fc5.requires_grad_(False)


def average() -> WeightAveraging:
    return WeightAveraging(avg_fn=lambda old, new, n: old + (new - old) * 0.3)


CASES: dict[str, dict[str, Any]] = {
    "accumulates and averages": {
        "module": {"scheduler": "step"},
        "trainer": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        "callbacks": [average, Freezes, lambda: ModelCheckpoint(monitor="val", filename="best")],
    },
    "stops early": {
        "module": {"scheduler": "plateau", "frozen": True},
        "trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        "callbacks": [lambda: EarlyStopping("val", patience=1, min_delta=9.0)],
        "strategy": {"schedule": "kfkb", "microbatches": 4},
    },
    "hooks": {"type": Hooked},
    "loss of whole batches": {
        "type": Compares,
        "module": {"scheduler": "step"},
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        "strategy": {"loss": "batch", "microbatches": 4},
    },
    "recomputes": {"trainer": {"accumulate_grad_batches": 2}, "strategy": {"recompute": True, "microbatches": 4}},
    "recomputes statistics": {"type": Normed, "strategy": {"recompute": True, "microbatches": 1}},
    "chooses its schedule": {"module": {"scheduler": "step"}, "strategy": {"schedule": "auto", "microbatches": None}},
    "chooses by memory": {"strategy": {"schedule": "auto", "microbatches": 4}},
    "skips batches": {"type": Skips, "trainer": {"accumulate_grad_batches": 2, "max_epochs": 3}},
    "mean over some samples": {"type": Masks, "strategy": {"schedule": "kfkb"}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}, "strategy": {"microbatches": 1}},
    "goes on": {"module": {"scheduler": "step"}, "trainer": {"max_epochs": 2}},
    "goes on in parts": {
        "module": {"scheduler": "step"},
        "trainer": {"max_epochs": 2},
        "strategy": {"checkpoint": "sharded"},
    },
}
RESUMED = ("goes on", "goes on in parts")


def train_case(name: str, stages: int, folder: str, resume: str | None = None, replicas: int = 1) -> dict[str, Any]:
    """Train and evaluate a case. With 0 stages, train in plain Lightning."""
    quiet()
    torch.set_num_threads(1)
    case, keeps = CASES[name], Keeps()
    options = {"schedule": "1f1b", "microbatches": 2, "data_parallel": replicas, **case.get("strategy", {})}
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "precision": "64-true", **case.get("trainer", {})}
    trainer = make_trainer(
        devices=stages * replicas or 1,
        strategy=PipelineStrategy(**options, shard_optimizer=replicas > 1) if stages else "auto",
        callbacks=[keeps, *(make() for make in case.get("callbacks", ()))],
        default_root_dir=folder,
        **settings | ({"max_epochs": 3} if resume else {}),
    )
    torch.manual_seed(0)
    module, (x, y), (v, w) = case.get("type", ByHand)(**case.get("module", {})), data().tensors, data(13).tensors
    if settings["precision"] == "64-true":
        module = module.double()
    else:
        x, v = x.float(), v.float()
    train, val = DataLoader(TensorDataset(x, y), batch_size=8), DataLoader(TensorDataset(v, w), batch_size=5)
    trainer.fit(module, train, val, ckpt_path=resume)
    path = f"{folder}/{name}-{stages}{'-resumed' if resume else ''}.ckpt"
    trainer.save_checkpoint(path)
    return {
        "path": path,
        "steps": keeps.steps,
        "epochs": trainer.current_epoch,
        "weights": plain_values(module.state_dict()),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "test": trainer.test(module, val, verbose=False),
        "predicted": plain_values(trainer.predict(module, val)),
    }


def train_all(rank: int, stages: int, folder: str, resume: dict[str, str], replicas: int = 1) -> dict[str, Any]:
    """Train all cases, or resume those that have a checkpoint in `resume`."""
    return {name: train_case(name, stages, folder, resume.get(name), replicas) for name in resume or CASES}


def refuse(rank: int, folder: str) -> tuple[str, str]:
    """Return the error if loss='batch' cannot be used, and the warning if it is not requested."""
    CASES["refused"] = {"type": Centres, "strategy": {"loss": "batch"}}
    with pytest.raises(PlanError) as error:
        train_case("refused", 2, folder)
    CASES["refused"] = {"type": type("Both", (Centres, Compares), {}), "trainer": {"max_epochs": 1}}
    with mock.patch.object(unit_setup, "rank_zero_warn") as warn:
        train_case("refused", 2, folder)
    return str(error.value), " ".join(call.args[0] for call in warn.call_args_list)


def test_a_loss_of_whole_batches_that_can_not_be_had(tmp_path: Path) -> None:
    for refused, warned in run_ranks(refuse, 2, str(tmp_path), timeout=120):
        assert "loss='batch' does not work for Centres: its samples meet before the last stage" in refused
        assert "no sum or mean of its losses for parts of them" in warned


def compare(expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Check that the results of all cases are equal."""
    for name, values in found.items():
        for part in ("steps", "epochs", "weights", "metrics", "test", "predicted"):
            assert differences(expected[name][part], values[part], 1e-10, f"{where}, {name}, {part}") == []


def paths_of(found: dict[str, Any], *names: str) -> dict[str, str]:
    return {name: found[name]["path"] for name in names}


def test_two_stages_are_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    alone, ranks = train_all(0, 0, folder, {}), run_ranks(train_all, 2, 2, folder, {}, timeout=120)
    for rank, found in enumerate(ranks):
        compare(alone, found, f"rank {rank}")
    saved = [torch.load(tmp_path / f"accumulates and averages-{n}.ckpt", weights_only=False) for n in (0, 2)]
    for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
        assert differences(*(plain_values(each[key]) for each in saved), 1e-10, key) == []

    # Two ranks resume from a checkpoint of one process, and one process from a checkpoint of two ranks.
    resumed = train_all(0, 0, folder, paths_of(alone, "goes on"))
    resumed["goes on in parts"] = resumed["goes on"]
    parts = paths_of(ranks[0], "goes on in parts")
    compare(resumed, train_all(0, 0, folder, paths_of(ranks[0], "goes on")), "2 to plain")
    for of in run_ranks(train_all, 2, 2, folder, paths_of(alone, "goes on") | parts, timeout=120):
        compare(resumed, of, "plain to 2")
    for of in run_ranks(train_all, 1, 1, folder, paths_of(ranks[0], *RESUMED), timeout=120):
        compare(resumed, of, "2 to 1")


def train_replicas(rank: int, stages: int, folder: str) -> dict[str, Any]:
    names = ("accumulates and averages", "hooks")
    return {name: train_case(name, stages, folder, replicas=2) for name in names}


def test_replicas_of_two_stages_are_replicas_of_one(tmp_path: Path) -> None:
    alone = run_ranks(train_replicas, 2, 1, str(tmp_path), timeout=120)
    for rank, found in enumerate(run_ranks(train_replicas, 4, 2, str(tmp_path), timeout=120)):
        compare(alone[rank // 2], found, f"rank {rank}")


def train_briefly(rank: int) -> None:
    quiet()
    pl.seed_everything(3, verbose=False)
    strategy = PipelineStrategy(partition=["fc4"], check_loss=False)
    make_trainer(strategy=strategy, precision="64-true").fit(ByHand().double(), DataLoader(data(), batch_size=8))
    print("trained")


def test_a_training_that_is_asked_for_its_cut_ends_with_it(tmp_path: Path) -> None:
    """Check the plan that is written by a training that is run only for its cut.

    Units are in the order of `forward`. For each of the two samples of a micro-batch, the skip and the result of the
    layers cross the border.
    """
    file = tmp_path / "cut.json"
    watch_ranks(train_briefly, 2, env={PLAN_VARIABLE: str(file)}, timeout=60)
    pieces = json.loads(file.read_text())
    called = [piece["name"] for piece in pieces if piece["name"].startswith(("fc", "back", "head"))]
    assert called == ["fc1", "fc2", "fc3", "fc4", "fc5", "back", "head"]
    stages = {piece["name"]: piece["stage"] for piece in pieces}
    assert [stages[name] for name in called] == [0, 0, 0, 1, 1, 1, 1]
    assert sum(piece["share"] for piece in pieces) == pytest.approx(1)
    assert [piece["bytes"] for piece in pieces if piece["bytes"] is not None] == [2 * 2 * WIDTH * 8]
