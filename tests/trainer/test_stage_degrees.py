"""Tests of stages with different numbers of ranks.

They train as one process. With schedules that use stale gradients, they train with the same staleness as without
replicas.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import LayerProfile, Link, ModelProfile
from lightning_pipes.ir import InputError, PlanError
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.ir.replication import list_shares
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from lightning_pipes.trainer.plan.profile_cache import (
    PROFILE_FOLDER,
    MeasuredRun,
    ProfileCache,
    clear_profiles,
    describe_module,
)
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.ranks.processes import process_rank
from tests.trainer.lit import Keeper, Lit, data, differences, plain_values, quiet
from tests.trainer.loop.streamed import ROWS, Streamed, stale
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

DEGREES = [2, 1], [1, 2]
TOLERANCE = 1e-10


class LitNumbers(Lit):
    """A module that logs numbers only, because a metric would have the samples of one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("right", (logits.argmax(1) == y).double().sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits}


class LitByUnits(LitNumbers):
    """A module whose first layer is used again by its last stage, so that it is cut by units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.model[0](x)
        x = first
        for layer in self.model[1:-1]:
            x = layer(x)
        return self.model[-1](x + first)  # type: ignore[no-any-return]


class LitKeeping(LitNumbers):
    """A module that keeps a value of its batch in an attribute."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.largest = batch[0].max()
        return super().training_step(batch, batch_idx)


TIME = VirtualClock()


class Uneven(nn.Module):
    """A layer that takes a millisecond per sample, and twelve on the second rank of the first stage."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TIME.sleep(1e-3 * len(x) * (12 if dist.is_initialized() and process_rank() == 1 else 1))
        return self.inner(x)  # type: ignore[no-any-return]


class LitUneven(LitNumbers):
    """A module whose first layer takes longer on one rank of the first stage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model[0] = Uneven(self.model[0])


class Shares(Callback):
    """A callback that records the number of samples on each rank of each stage for every batch."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if isinstance(trainer.strategy, PipelineStrategy):
            self.seen.append(list_shares(trainer.strategy.current_run.engine.plan))


def fit(
    folder: str, schedule: str, degrees: Any, ranks: int, m: int = 2, resume: str | None = None, **more: Any
) -> dict[str, Any]:
    """Train and return the weights, metrics, losses and shares of samples.

    Args:
        folder: the folder for checkpoints.
        schedule: name of the schedule.
        degrees: the `data_parallel` argument, or None to train without a pipeline.
        ranks: number of processes.
        m: number of micro-batches.
        resume: path of a checkpoint to resume from.
        **more: the module class, further arguments of the strategy, and arguments of the Trainer.
    """
    quiet()
    pl.seed_everything(3, verbose=False)
    module, keeper, shares = more.pop("module", LitNumbers)().double(), Keeper(), Shares()
    kept = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    settings = {"microbatches": m, "partition": [4], **more.pop("strategy", {})}
    trainer = make_trainer(
        devices=ranks,
        strategy="auto" if degrees is None else PipelineStrategy(schedule, data_parallel=degrees, **settings),
        precision="64-true",
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[keeper, kept, shares],
        **{"max_epochs": 1, **more},
    )
    loaders = DataLoader(data(ROWS), batch_size=4), DataLoader(data(13), batch_size=5)
    trainer.fit(module, *loaders, ckpt_path=resume, weights_only=False)
    return {
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "losses": [float(out["loss"]) for out in keeper.outputs if isinstance(out, dict)],
        "shares": shares.seen,
    }


def train_all(rank: int, folder: str) -> dict[str, Any]:
    """Train all cases and return their results, and the messages of refused cases."""
    found: dict[str, Any] = {}
    for degrees in DEGREES:
        for schedule, m in (("1f1b", 2), ("kfkb", 2), ("pipedream", 1), ("dynpipe", 2)):
            name = f"{schedule} {degrees}"
            found[name] = fit(f"{folder}/{name}", schedule, degrees, 3, m)
    found["clipped"] = fit(f"{folder}/clipped", "1f1b", [2, 1], 3, gradient_clip_val=0.05, accumulate_grad_batches=2)
    found["sharded"] = fit(f"{folder}/sharded", "1f1b", [1, 2], 3, strategy={"checkpoint": "sharded"})
    by_units = {"partition": ["model.4"]}
    for degrees in DEGREES:
        for schedule, m in (("1f1b", 2), ("kfkb", 2), ("pipedream", 1)):
            name = f"{schedule} {degrees} by units"
            kind = LitNumbers if schedule == "pipedream" else LitByUnits
            found[name] = fit(f"{folder}/{name}", schedule, degrees, 3, m, module=kind, strategy=by_units)
    more: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "module": LitByUnits}
    found["clipped by units"] = fit(f"{folder}/clipped units", "1f1b", [2, 1], 3, strategy={"module": ""}, **more)
    looks = {"every": 2, "windows": 2}
    uneven: dict[str, Any] = {"degrees": [2, 1], "ranks": 3, "module": LitUneven, "max_epochs": 2}
    with pytest.MonkeyPatch.context() as patch:
        TIME.patch(patch)
        found["balanced"] = fit(f"{folder}/balanced", "1f1b", strategy={"replan": looks}, **uneven)
        found["streamed"] = fit(f"{folder}/streamed", "dynpipe", m=1, strategy={"schedule_args": looks}, **uneven)
    refused = {
        "policy": ([2, 1], {"schedule": "ready"}, PlanError),
        "auto": ([2, 1], {"schedule": "auto", "strategy": {"partition": "auto"}}, PlanError),
        "stages": ([1, 1, 1], {"schedule": "interleaved", "strategy": {"partition": "auto"}}, PlanError),
        "processes": ([3, 1], {}, PlanError),
    }
    for name, (degrees, more, error) in refused.items():
        with pytest.raises(error) as told:
            fit(f"{folder}/{name}", **{"schedule": "1f1b", "degrees": degrees, "ranks": 3, **more})
        found[name] = str(told.value)
    return found


def lopsided() -> ModelProfile:
    """Return a profile of nine layers, with a slow first layer and large gradients in all others."""
    slow = LayerProfile(
        "slow", ((0, 0.0), (1, 4.0)), ((0, 0.0), (1, 8.0)), weight_bytes=8, gradient_bytes=8, output=((1, 8.0),)
    )
    large = replace(
        slow, forward=((0, 0.0), (1, 0.1)), backward=((0, 0.0), (1, 0.2)), weight_bytes=10**9, gradient_bytes=10**9
    )
    return ModelProfile((slow,) + (large,) * 8)


def train_chosen(rank: int, folder: str) -> list[dict[str, Any]]:
    """Train with stages that the strategy chooses, and with the same stages given."""
    module = LitNumbers().double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_PIPES_PROFILES", folder)
        if rank == 0:
            run = MeasuredRun(lopsided(), 4, Link(bandwidth=1e9, latency=1e-6))
            ProfileCache(Path(folder)).keep_run(describe_module(module), run)
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        every: list[Any] = ["auto", {1: 1.0, 2: 1.0, 3: 90.0}]
        found = [fit(mkdtemp(), "dynpipe", 1, 3, strategy={"partition": "auto", "stages": n}) for n in every]
        given = fit(mkdtemp(), "dynpipe", [2, 1], 3, strategy={"partition": [1]})
        patch.setenv("LIGHTNING_PIPES_PROFILES", f"{folder}/none")
        with pytest.raises(InputError) as told:
            fit(mkdtemp(), "dynpipe", 1, 3, strategy={"partition": "auto", "stages": "auto"})
    return [*found, given, {"said": str(told.value)}]


def test_stages_are_chosen_by_what_an_earlier_run_has_measured() -> None:
    """With a kept profile, the strategy chooses two ranks for the slow layer and one for the large gradients."""
    for chosen, by_batches, given, refused in run_ranks(train_chosen, 3, mkdtemp(), timeout=200):
        assert differences(chosen["weights"], given["weights"], tolerance=0) == []
        assert differences(by_batches["weights"], given["weights"], tolerance=0) == []
        assert "no earlier run of LitNumbers has left any below" in refused["said"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stages": "few"}, "stages must be 'auto', or the batches"),
        ({"stages": {2: 10.0}}, "of two numbers or more"),
        ({"stages": "auto", "schedule": "1f1b"}, "schedule 1f1b has no stale gradients"),
        ({"stages": "auto", "schedule": "auto"}, "schedule auto has no stale gradients"),
        ({"stages": "auto", "partition": [4]}, r"partition=\[4\] fixes them"),
        ({"stages": "auto", "data_parallel": 2}, "data_parallel=2 fixes them"),
    ],
)
def test_stages_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PipelineStrategy(**{"schedule": "dynpipe", **settings})


def test_a_run_keeps_what_it_has_measured_for_the_choice(tmp_path: Path) -> None:
    """The measurements of a run are found again for an equal module, but not for a different one."""
    run = MeasuredRun(lopsided(), 32, Link(latency=1e-5))
    cache, module = ProfileCache(tmp_path / PROFILE_FOLDER), Lit()
    cache.keep_run(describe_module(module), run)
    assert cache.find_run(describe_module(Lit())) == run
    assert cache.find_run(describe_module(Lit(layers=7))) is None
    assert cache.find_run(describe_module(LitNumbers())) is None
    assert clear_profiles(tmp_path) == 1


def train_module(rank: int, kind: type[Lit], folder: str) -> None:
    """Train a module with one rank in the first stage and two in the second."""
    fit(folder, "1f1b", [1, 2], 3, module=kind)


def resume(rank: int, path: str, schedule: str, degrees: Any, ranks: int) -> dict[str, Any]:
    """Train for one more epoch from a checkpoint."""
    return fit(mkdtemp(), schedule, degrees, ranks, resume=path, max_epochs=2)


def test_weights_logs_and_checkpoints() -> None:
    """Stages of one and two ranks have the results of one process.

    With schedules that use stale gradients, the weights equal a reference with the same staleness.
    """
    folder = mkdtemp()
    ranks = run_ranks(train_all, 3, folder, timeout=300)
    whole = fit(f"{folder}/whole", "1f1b", None, 1)
    clipped = fit(f"{folder}/one", "1f1b", None, 1, gradient_clip_val=0.05, accumulate_grad_batches=2)
    uneven = fit(f"{folder}/uneven", "1f1b", None, 1, module=LitUneven, max_epochs=2)
    units = fit(f"{folder}/units", "1f1b", None, 1, module=LitByUnits)
    more: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "module": LitByUnits}
    clipped_units = fit(f"{folder}/clipped unit", "1f1b", None, 1, **more)
    for found in ranks:
        for degrees in DEGREES:
            for schedule in ("1f1b", "kfkb"):
                _same(found[f"{schedule} {degrees}"], whole)
            for schedule, m in (("pipedream", 1), ("dynpipe", 2)):
                wanted = stale(Streamed("pipedream", 2, m), 9, {4, 8, 9})
                assert _largest(found[f"{schedule} {degrees}"]["weights"], wanted["weights"]) < TOLERANCE
            for schedule in ("1f1b", "kfkb"):
                _same(found[f"{schedule} {degrees} by units"], units)
            wanted = stale(Streamed("pipedream", 2, 1), 9, {4, 8, 9})
            assert _largest(found[f"pipedream {degrees} by units"]["weights"], wanted["weights"]) < TOLERANCE
        _same(found["clipped"], clipped)
        _same(found["clipped by units"], clipped_units)
        _same(found["sharded"], whole)
        _same(found["balanced"], uneven)
        wanted = stale(Streamed("pipedream", 2, 1), 18, {4, 8, 9, 12, 16, 18, *_changes(found["streamed"])})
        assert _largest(found["streamed"]["weights"], of_layers(wanted["weights"])) < TOLERANCE
        for what in ("balanced", "streamed"):
            (fast, slow), _ = max(found[what]["shares"][-2:])  # the last batch of an epoch has two samples only
            assert fast > slow
        assert "decides its order while it runs" in found["policy"]
        assert "chooses the number of stages" in found["auto"]
        assert "one stage a rank" in found["stages"]
        assert "takes 4 processes, and there are 3" in found["processes"]

    longer = fit(f"{folder}/longer", "1f1b", None, 1, max_epochs=2)
    for name in ("1f1b [2, 1]", "1f1b [1, 2]", "sharded"):
        (path,) = Path(folder, name).glob("step=8*")
        for found in run_ranks(resume, 2, str(path), "1f1b", 1, 2, timeout=60):
            assert _largest(found["weights"], longer["weights"]) < TOLERANCE


@pytest.mark.parametrize(("kind", "text"), [(LitKeeping, "sets self.largest"), (Lit, "logs a metric")])
def test_refuses_state_of_part_of_a_batch(kind: type[Lit], text: str) -> None:
    """Modules that keep state of a batch are refused, because each rank has only a part of the batch."""
    with pytest.raises(RanksFailedError, match=text):
        run_ranks(train_module, 3, kind, mkdtemp(), timeout=60)


def test_settings() -> None:
    for settings, text in (
        ({"data_parallel": []}, "each stage its number"),
        ({"data_parallel": [2, 0]}, "data_parallel of stage 1"),
        ({"data_parallel": [2, 1], "shard_optimizer": True}, "shard_optimizer"),
        ({"data_parallel": [2, 1], "tensor_parallel": 2}, "tensor_parallel"),
        ({"data_parallel": [2, 1], "relocation": "overlapped"}, "relocation"),
        ({"data_parallel": [2, 1], "verify": 1}, "verify"),
    ):
        with pytest.raises(InputError, match=text):
            PipelineStrategy("1f1b", **settings)  # type: ignore[arg-type]


def test_layers_that_stay_are_warned_of() -> None:
    """A warning is given for a schedule that moves layers, but not for one that keeps them."""
    sizes, warned = [4, 4, 4, 4], []
    for name in ("1f1b", "dynpipe"):
        request = RunRequest(make_schedule(name), 4, False, "auto")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            request.unmeasured(sizes, 2, degrees=(2, 1))
        warned.append([str(each.message) for each in found])
    assert warned[0] == []
    assert "the only rank of a stage keeps all of its samples" in warned[1][0]


def _changes(found: dict[str, Any]) -> set[int]:
    """Return the batches before which the division of a batch of four samples over ranks changed."""
    whole = [(n, each) for n, each in enumerate(found["shares"]) if sum(each[1]) == 4]
    return {n for (_, before), (n, now) in pairwise(whole) if before != now}


def of_layers(weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights under the names that they have in LitUneven."""
    return {name.replace("model.0.", "model.0.inner."): value for name, value in weights.items()}


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert _largest(found["weights"], wanted["weights"]) < TOLERANCE
    for what in ("metrics", "losses"):
        assert differences(found[what], wanted[what], at=what) == []


def _largest(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((torch.as_tensor(found[k]) - torch.as_tensor(wanted[k])).abs().max()) for k in wanted)
