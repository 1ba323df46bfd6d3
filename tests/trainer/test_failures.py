"""Tests of bad input and of failures: every rank ends soon with a message that names the problem."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from dataclasses import dataclass
from functools import partial
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import TransformerEnginePrecision
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, watch_ranks
from lightning_pipes.trainer import checks
from lightning_pipes.trainer.checks import warn_about_microbatch_effects, warn_about_module, warn_about_small_batch
from tests.trainer.lit import ROWS, Lit, LitOutside, data, quiet
from tests.trainer.refused import BareExcept, OwnForward, Penalty, Twice
from tests.trainers import make_trainer

SOON = 12.0
"""Seconds after which all processes must have ended. Starting them takes one or two seconds of this time."""


def fit(rank: int, module: type[Lit], ranks: int, strategy: dict[str, Any], more: dict[str, Any]) -> None:
    quiet()
    pl.seed_everything(3, verbose=False)
    lit = module().double()
    trainer = make_trainer(
        devices=ranks,
        strategy=PipelineStrategy(**{"microbatches": 2, **strategy}),
        precision="64-true",
        **{"enable_checkpointing": False, "max_epochs": 50, **more},
    )
    own = module is FewerBatches
    trainer.fit(lit, None if own else DataLoader(data(), batch_size=8), DataLoader(data(5), batch_size=5))


def bad_inputs(rank: int, cases: list[tuple[type[Lit], dict[str, Any]]], ranks: int) -> list[str]:
    """Return the error message of each case on this rank."""
    messages = []
    for module, strategy in cases:
        try:
            own = {
                name: value.values[rank] if isinstance(value, EachRank) else value for name, value in strategy.items()
            }
            fit(rank, module, ranks, own, {})
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("nothing was raised")
    return messages


class Checkpointed(Lit):
    """A module that calls its layers within `torch.utils.checkpoint`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


class Never(Lit):
    """A module whose training step does not call its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return next(self.parameters()).sum()


class NoLoss(Lit):
    """A module whose training step returns None."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class VectorLoss(Lit):
    """A module whose loss has one value per sample."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class Detached(Lit):
    """A module whose loss has no graph."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch).detach()


class Pooled(Lit):
    """A module whose layers get a mean over samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model((x.mean(0, keepdim=True), None))


class Searching(Lit):
    """A module with an optimizer that runs the training step several times."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class NoSequential(Lit):
    """A module without an `nn.Sequential` or a call of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"encoder": self.model, "decoder": copy.deepcopy(self.model)})
        del self.model


class MaskedByLayers(Lit):
    """A module that makes a mask of flex attention from the outputs of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.model(x)
        order = h.argmax(-1)
        create_block_mask(lambda b, head, q, kv: order[q] >= order[kv], None, None, len(x), len(x), device="cpu")
        return h


class TwoArguments(Lit):
    """A module that calls its layers with two arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, x)


class ForeignWeights(Lit):
    """A module whose loss contains the weights of one layer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) + self.model[0][0].weight.norm()


class OtherModule(Lit):
    """A module with a different number of layers on each rank."""

    def __init__(self) -> None:
        super().__init__(layers=9 if os.environ["RANK"] == "0" else 11)


class OtherBatches(Lit):
    """A module that changes its batches on rank 1."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + int(os.environ["RANK"]), y


class OtherBatchesLater(Lit):
    """A module that changes the last batch of each epoch on rank 1."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + int(os.environ["RANK"]) * (len(x) == ROWS % 8), y


class OtherSubnets(Lit):
    """A module that selects different layers for the same batch on each rank."""

    def layers_of_batch(self, batch: Any) -> list[str]:
        return ["0", "1", "8" if os.environ["RANK"] == "0" else "6"]


class FewerBatches(Lit):
    """A module that has fewer batches on rank 1."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(data(24), range(24 - 8 * int(os.environ["RANK"]))), batch_size=8)


class Sharded(Lit):
    """A module that shards a layer with `fully_shard`."""

    def configure_model(self) -> None:
        fully_shard(self.model[0])


class CalledInHook(Lit):
    """A module that calls its layers in a hook."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.model(torch.zeros(1))


@dataclass(frozen=True)
class EachRank:
    """An argument with a different value on each rank."""

    values: tuple[Any, ...]


LAYERS = {"module": "model"}
"""Selects the layers by name; otherwise, such modules are cut by units."""
BAD: list[tuple[type[Lit], dict[str, Any], str]] = [
    (Lit, {"schedule": "interleaved", "schedule_args": {"stages_per_rank": 5}}, "9 layers can't fill 10 stages"),
    (Sharded, {}, "model.0.0.weight is sharded over"),
    (
        Lit,
        {"partition": [1, 2]},
        "partition=[1, 2] defines 3 stages, but this run has 2. Give 1 number: the first layer",
    ),
    (
        Lit,
        {"partition": [10]},
        "partition=[10] must contain the first layers of stages in ascending order, from 0 to 9",
    ),
    (Lit, {"module": "encoder"}, "module='encoder': Lit has no such module. It has 'model', 'mean'"),
    (Penalty, LAYERS, "a step goes through all modules or parameters of self.model"),
    (Lit, {"module": "mean"}, "Lit.mean is a MeanOfAll; only an nn.Sequential, or an nn.ModuleList"),
    (NoSequential, {}, "is to be cut by units, but its training_step can't be recorded: AttributeError"),
    (MaskedByLayers, {"module": ""}, "or within a mask_mod of flex attention, at "),
    (OwnForward, LAYERS, "with a forward of its own"),
    (Twice, LAYERS, "calls self.model(...) more than once"),
    (Never, {}, "training_step ended without a call of self.model(...)"),
    (BareExcept, LAYERS, "Replace a bare `except:` around the call by `except Exception:`"),
    (NoLoss, {}, "training_step returned no loss"),
    (VectorLoss, {}, "returned a loss of shape (4,)"),
    (Detached, {}, "returned a loss that nothing can be trained by"),
    (Pooled, {}, "gets shapes (1, 6) for 5 samples; axis 0 of a tensor must count samples"),
    (Searching, {}, "LBFGS runs training_step several times"),
    (Lit, {"transport": "nccl"}, "transport 'nccl' needs tensors on a GPU, not on cpu"),
    (TwoArguments, {}, "with 2 positional arguments"),
    (ForeignWeights, {}, "weights of layers that live on another rank"),
    (OtherModule, {}, "built different modules"),
    (
        Lit,
        {"microbatches": EachRank((4, 5))},
        "PipelineStrategy has different arguments on rank 1: microbatches=5, rank 0 4",
    ),
    (Lit, {"schedule": EachRank(("gpipe", "1f1b"))}, "on rank 1: schedule=1f1b, rank 0 gpipe"),
    (
        Lit,
        {"relocation": EachRank(("blocking", "overlapped"))},
        "on rank 1: relocation='overlapped', rank 0 'blocking'",
    ),
    (OtherBatches, {}, "loaded different batches (checksums rank 0:"),
    (OtherBatchesLater, {}, "training, batch 2: the ranks of one pipeline loaded different batches"),
    (OtherBatchesLater, {"schedule": "pipedream"}, "training, batch 2: the ranks of one pipeline loaded different"),
    (
        OtherSubnets,
        {"schedule": "csp"},
        "training, batch 0: the ranks of one pipeline have the batch use different layers (8 on rank 0; 6 on rank 1)",
    ),
    (FewerBatches, {}, "the training data of some ranks end with batch 1"),
    (CalledInHook, {}, "was called outside of training_step"),
    (Checkpointed, {}, "instead of torch.utils.checkpoint, which calls it again, set PipelineStrategy(recompute=True)"),
]


@pytest.fixture(scope="module")
def messages() -> list[tuple[str, ...]]:
    """Return the error messages of all ranks for each case.

    All cases run one after another in the same processes, so every case also checks that the processes survived the
    cases before it.
    """
    cases = [(module, strategy) for module, strategy, _ in BAD]
    outcomes = watch_ranks(bad_inputs, 2, cases, 2, timeout=100)
    assert [o.error for o in outcomes] == ["", ""]
    return list(zip(*(o.value for o in outcomes), strict=True))


@pytest.mark.parametrize("number", range(len(BAD)), ids=[f"{m.__name__} {s or ''}" for m, s, _ in BAD])
def test_bad_input_is_refused_on_every_rank(number, messages):
    for message in messages[number]:
        assert BAD[number][2] in message


def test_settings_are_checked_at_once():
    with pytest.raises(PlanError, match=r"no schedule is called '1f1d'\. Did you mean '1f1b'"):
        PipelineStrategy("1f1d")
    with pytest.raises(PlanError, match="microbatches must be at least 1, got 0"):
        PipelineStrategy(microbatches=0)
    with pytest.raises(PlanError, match="microbatches must be a whole number, got '4'"):
        PipelineStrategy(microbatches="4")
    with pytest.raises(PlanError, match=r"kfkb: k must be a whole number, got 2\.0; k=1 is 1F1B"):
        PipelineStrategy("kfkb", schedule_args={"k": 2.0})
    with pytest.raises(
        PlanError, match=r"schedule must be the name of a schedule, or an object .*, got <class .*KFKB'>"
    ):
        PipelineStrategy(KFKB)
    with pytest.raises(PlanError, match=r"KFKB\(k=1\) has its settings already"):
        PipelineStrategy(KFKB(), schedule_args={"k": 2})
    with pytest.raises(PlanError, match="partition must be 'auto', 'parameters' or a list"):
        PipelineStrategy(partition="seconds")
    with pytest.raises(
        PlanError, match="transport: no transport is called 'smoke'; choose 'auto', 'local', 'gloo' or 'nccl'"
    ):
        PipelineStrategy(transport="smoke")
    with pytest.raises(PipelineError, match="does not take"):
        PipelineStrategy("kfkb", schedule_args={"depth": 2})


class Failing(Callback):
    """A callback that fails on one rank: by an exception, by Ctrl-C, or by killing the process."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 4:
            if self.how == "raise":
                raise ValueError("a bad day")
            if self.how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)


class FailingLayer(Lit):
    """A module with a layer that fails on the middle rank of three."""

    def __init__(self) -> None:
        super().__init__()

        class Bad(nn.Module):
            calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                if self.calls == 6:
                    raise ValueError("a bad layer")
                return x

        self.model[4] = Bad()


@pytest.mark.parametrize(
    ("module", "rank", "how", "said"),
    [
        (Lit, 0, "raise", "rank 0 (stage 2) failed: ValueError: a bad day"),
        (Lit, 2, "raise", "rank 2 (stage 0) failed: ValueError: a bad day"),
        (FailingLayer, 1, "", "rank 1 failed in instruction F1[0:4] (forward of stage 1, samples 0 to 3): ValueError"),
        (Lit, 2, "interrupt", "rank 2 (stage 0) failed: KeyboardInterrupt"),
        (Lit, 1, "die", "rank 1"),
    ],
)
def test_all_ranks_end_if_one_fails(module, rank, how, said):
    """If one rank fails, all ranks end soon, and the error messages of the other ranks name this failure."""
    more = {"callbacks": [Failing(rank, how)]}
    outcomes = watch_ranks(fit, 3, module, 3, {}, more, timeout=30)
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} continued"
        assert outcome.seconds < scale_timeout(SOON), f"rank {outcome.rank}: {outcome.error}"
        if outcome.rank != rank:
            assert said in outcome.error
    if how == "raise":
        assert "a bad day" in outcomes[rank].error


class FailingInAStep(LitOutside):
    """A module that fails on rank 1 after its optimizer step, while the other rank may or may not have stepped."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()

        def fail(*_: Any) -> None:
            if self.trainer.global_rank == 1:
                raise ValueError("a bad day")

        made["optimizer"].register_step_post_hook(fail)
        return made


def test_ranks_within_a_step_save_their_parts():
    """After a failure within an optimizer step, a rank saves its own weights instead of a whole checkpoint.

    Weights before and after a step don't belong together.
    """
    folder = mkdtemp()
    saver = ModelCheckpoint(folder, filename="last", save_on_exception=True)
    saver._last_global_step_saved = -1  # Lightning would otherwise assume that the initial weights are saved
    more = {"callbacks": [saver], "enable_checkpointing": True}
    outcomes = watch_ranks(fit, 2, FailingInAStep, 2, {}, more, timeout=30)
    assert all(o.error and o.seconds < scale_timeout(SOON) for o in outcomes)
    assert "last.ckpt" not in os.listdir(folder)
    parts = [name for name in os.listdir(folder) if "rank1of2" in name]
    assert parts
    state = torch.load(os.path.join(folder, parts[0]), weights_only=False)["state_dict"]
    assert "model.0.0.weight" in state
    assert "model.8.weight" not in state


class FailingSearch(Lit):
    """A module that fails in the third batch, during a search for the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ValueError("a bad day")
        return super().training_step(batch, batch_idx)


def test_a_search_that_fails_leaves_no_file_and_raises_its_error(tmp_path):
    more = {"callbacks": [LearningRateFinder(num_training_steps=5)], "default_root_dir": str(tmp_path)}
    outcomes = watch_ranks(fit, 2, FailingSearch, 2, {}, more, timeout=30)
    assert all("ValueError: a bad day" in o.error and "can't continue together" not in o.error for o in outcomes)
    assert os.listdir(tmp_path) == []


class Normal(Lit):
    """A module with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, nn.BatchNorm1d(6))


def test_batch_normalisation_warns_once():
    with pytest.warns(UserWarning, match="^layer 2: batch normalization sees one micro-batch at a time") as caught:
        warn_about_microbatch_effects(Normal().model)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="^layers 0, 1: batch normalization"):
        warn_about_microbatch_effects(nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6)))


def test_a_short_last_batch_is_normalised():
    """Batch normalization trains even if a short batch has fewer than two samples per micro-batch.

    Six samples in four micro-batches would be two, two, one and one, and a single sample has no variance.
    """
    run_ranks(fit, 2, Normal, 2, {"microbatches": 4}, {"max_epochs": 1})


class Cut(Callback):
    """A callback that cuts all batches after the first into two micro-batches."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.strategy.adopt(trainer.strategy.schedule, 2)  # type: ignore[attr-defined]


def warned(rank: int, ways: list[tuple[int, int | None, bool]]) -> list[bool]:
    """Return, for each way to train, whether it warns about batch normalization.

    Args:
        rank: this rank.
        ways: siblings that run at a time (0 without an array), number of micro-batches, and whether Cut is used.
    """
    found = []
    for size, microbatches, adopts in ways:
        options = {"max_epochs": 1, "limit_train_batches": 2, "callbacks": [Cut()] if adopts else []}
        jobs = [partial(fit, rank, Normal, 2, {"microbatches": microbatches}, options) for _ in range(size or 1)]
        said: list[str] = []
        with mock.patch.object(checks, "rank_zero_warn", said.append):
            if size:
                assert [o.error for o in JobArray(size).run(jobs)] == [None] * size
            else:
                jobs[0]()
        found.append(any("batch normalization" in text for text in said))
    return found


def test_batch_normalisation_warns_where_batches_are_cut():
    """Training warns about batch normalization exactly if batches are cut into micro-batches.

    By default, the siblings of an array cut batches if fewer siblings run at a time than twice the number of stages.
    """
    ways = [(0, 1, False), (0, None, False), (0, 1, True), (1, None, False), (4, None, False), (4, 2, False)]
    assert run_ranks(warned, 2, ways, timeout=60) == [[False, True, True, True, False, True]] * 2


def test_a_copy_of_the_layers_warns():
    module = LitOutside()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_module(module, module.model)
    module.teacher = copy.deepcopy(module.model)
    with pytest.warns(UserWarning, match="teacher has the same layers as the container"):
        warn_about_module(module, module.model)


def test_a_weight_that_trains_below_an_adapter_warns():
    module = LitOutside()
    layer = nn.Module()  # with the attributes of a layer of peft
    layer.base_layer, layer.lora_A, layer.adapter_layer_names = nn.Linear(6, 6), nn.Linear(6, 2), ("lora_A",)
    module.model[1] = layer
    with pytest.warns(UserWarning, match=r"^model\.1\.base_layer\.weight: trains although it has an adapter of peft"):
        warn_about_module(module, module.model)
    layer.base_layer.weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_module(module, module.model)


class Adapting(Lit):
    """A module that wraps a part of a layer in an adapter after the layers have been distributed to the ranks."""

    def on_train_start(self) -> None:
        self.model[0][0] = nn.Sequential(self.model[0][0])


class Growing(Lit):
    """A module that adds a weight to a layer during training, as peft does when it loads a second adapter."""

    def on_train_start(self) -> None:
        self.model[0][0].register_parameter("scale", nn.Parameter(torch.ones(1)))


def adapt(rank: int) -> list[str]:
    """Return the error messages of training Adapting and Growing."""
    found = []
    for module in (Adapting, Growing):
        with pytest.raises((PipelineError, PeerFailure)) as error:
            fit(rank, module, 2, {}, {"max_epochs": 1, "limit_train_batches": 1})
        found.append(str(error.value))
    return found


def test_an_adapter_for_layers_elsewhere_is_named():
    """Weights that a hook replaces or adds after the layers have been distributed are named in the error message."""
    for replaced, added in run_ranks(adapt, 2, timeout=60):
        names = (
            "a hook has replaced self.model.0.0.weight of a layer on another rank",
            "self.model.0.0.0.weight was added",
        )
        assert any(name in replaced for name in names)  # messages of the rank without and the rank with the layer
        assert "self.model.0.0.scale was added to a layer during the run" in added


def test_spectral_norm_warns():
    module = Lit()
    nn.utils.parametrizations.spectral_norm(module.model[2][0])
    with pytest.warns(UserWarning, match=r"2\.0: spectral normalization improves its estimate in every forward"):
        warn_about_microbatch_effects(module.model)


def test_batches_too_small_for_the_stages_warn(recwarn, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr("lightning_pipes.trainer.checks.rank_zero_info", notes.append)
    warn_about_small_batch(4, stages=4, pieces=4, asked=4)
    warn_about_small_batch(1, stages=4, pieces=1, asked=1)  # a batch of graphs, whose samples are not counted
    assert not recwarn
    with pytest.warns(UserWarning, match="a batch of 3 samples can't keep 4 stages busy"):
        warn_about_small_batch(3, stages=4, pieces=3, asked=3)
    warn_about_small_batch(4, stages=4, pieces=4, asked=8)
    assert notes.pop() == "A batch of 4 samples is cut into 4 micro-batches instead of 8"
    warn_about_small_batch(1, stages=1, pieces=1, asked=8)
    assert notes == ["A batch of 1 sample is cut into 1 micro-batch instead of 8"]


class Pair(torch.Tensor):
    """A tensor with two inner tensors, like a quantized weight with values and scales."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scales"], None


def test_weights_of_several_tensors_are_refused():
    lit: Any = Lit()
    lit.model[0][0].weight = nn.Parameter(torch.zeros(2).as_subclass(Pair), requires_grad=False)
    with pytest.raises(PipelineError, match=r"Lit.model.0.0.weight is a Pair, .* quantize the layers after training"):
        checks.check_module(lit, fitting=True)


def test_float8_that_all_processes_scale_together_is_refused():
    with pytest.raises(PipelineError, match=r"TransformerEnginePrecision can't .* Use precision='bf16-mixed'"):
        checks.check_precision(object.__new__(TransformerEnginePrecision))
