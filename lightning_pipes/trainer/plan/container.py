"""Selection of the container that is cut, from the time that the containers take in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_pipes.cost import ModelProfile
from lightning_pipes.engine.compute.profiler import wait_for_device
from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.ir import Kind
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.cuts.layers.pipelined import find_pipelined, list_containers, work_size
from lightning_pipes.trainer.data.batches import copy_batch, rows_of
from lightning_pipes.trainer.data.sample import NoSampleError, batch_rows, example_batch, load_batch
from lightning_pipes.trainer.plan.layer_profiler import (
    CollectiveCall,
    LayerProfiler,
    NotMeasuredError,
    UnsuitableContainerError,
    without_loggers,
)
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.results.logs import recorded
from lightning_pipes.trainer.user.unchanged import keep_unchanged
from lightning_pipes.trainer.weights.deferred import has_meta

N_TIMED_ROWS, N_TIMED_RUNS = 4, 4
"""The number of samples of the step in which containers are timed, and the number of runs. For each layer, the fastest
run counts."""
MIN_WORK_OF_LAYERS = 0.5
"""The smallest share of the work that the layers should have."""
MIN_PARAMETER_SHARE = 0.8
"""The share of the parameters with which layers certainly have most of the work. Otherwise, operations are counted."""


def find_container(trainer: pl.Trainer, module: pl.LightningModule, control: Control, device: torch.device) -> str:
    """Return the path of the container to cut if the user has not named one.

    If there are several containers, the one with the largest measured time is selected, provided that a step can run.
    This function is collective.

    Raises:
        PipelineError: there is no container, none is clearly the best, or it is not run layer by layer.
    """
    seconds = None
    fitting = trainer.state.fn == TrainerFn.FITTING and trainer.limit_train_batches != 0
    if fitting and control.size > 1 and len(list_containers(module)) > 1:
        seconds = _time_containers(trainer, module, control, device)
    return find_pipelined(module, None, seconds)


class UnitsReason(NamedTuple):
    """The reason why a module should be cut by units instead of in the layers of a container.

    Attributes:
        text: the reason. Empty if the module should be cut in the layers.
        is_of_loss: whether units are only better if they compute the loss of whole batches.
    """

    text: str = ""
    is_of_loss: bool = False


def find_reason_for_units(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    path: str,
    control: Control,
    device: torch.device,
    compares_losses: bool,
) -> UnitsReason:
    """Return the reason why a module should be cut by units, or an empty reason if this cannot be determined.

    Possible reasons are that the step cannot run the layers in a pipeline, that most of the work is outside of the
    layers, that the layers are a frozen teacher, and that the losses of micro-batches do not reproduce the loss of the
    batch. This function is collective.

    Args:
        trainer: the Trainer.
        module: the user's module.
        path: the path of the container.
        control: the control channel of all ranks.
        device: the device of this rank.
        compares_losses: whether losses are compared.
    """
    if control.any(has_meta(module))[0] or private.has_delayed_training_data(trainer):
        return UnitsReason()
    data = private.run_data(trainer)  # on all ranks: it may draw random numbers
    collective, loaded = CollectiveCall(control), []

    def load() -> None:
        try:
            with forked_rng(device):
                batch = load_batch(data, N_TIMED_ROWS)
        except NoSampleError as why:
            raise NotMeasuredError(str(why)) from None
        loaded.append((batch, (rows_of(batch, cut=False),)))

    try:
        collective(load)
        with LayerProfiler(trainer, path, *loaded[0], device, collective) as profiler:
            whole = work_size(module)
            if not whole or work_size(module.get_submodule(path)) / whole >= MIN_PARAMETER_SHARE:
                profiler.check_step()
            else:
                inside, around, largest = profiler.count_operations()  # this checks the step, too
                if around - largest > inside:  # a single large part, such as a head, is on one rank in any case
                    share = inside / (inside + around)
                    return UnitsReason(f"only {share:.0%} of the operations of a step are in these")
            if profiler.is_without_gradients():
                return UnitsReason("their weights are frozen, and training needs no gradients of these layers")
            losses = profiler.compare_losses() if compares_losses else ""
            if losses:
                return UnitsReason(f"the loss of training_step is {losses}", is_of_loss=True)
    except UnsuitableContainerError as why:
        return UnitsReason(why.reason)
    except NotMeasuredError:
        pass  # an error of the user's code, which training will raise with more context
    return UnitsReason()


def _time_containers(
    trainer: pl.Trainer, module: pl.LightningModule, control: Control, device: torch.device
) -> dict[str, float] | None:
    """Return the seconds of the containers with layers that a step runs once and in order.

    The result is the same on all ranks, and None if the step cannot run. Rank 0 does not run the step, because its
    loggers would write.
    """
    if has_shards(module) or control.any(has_meta(module))[0] or private.has_delayed_training_data(trainer):
        return None
    data = private.run_data(trainer)  # on all ranks: it may draw random numbers

    def run() -> dict[str, float] | None:
        return None if control.position == 0 else _time_step(trainer, module, data, device)

    try:
        found = [each for each in CollectiveCall(control)(run) if each is not None]
    except NotMeasuredError:
        return None
    paths = set.intersection(*map(set, found))
    return {path: min(each[path] for each in found) for path in sorted(paths)} or None


def _time_step(trainer: pl.Trainer, module: pl.LightningModule, data: Any, device: torch.device) -> dict[str, float]:
    clocks = [
        ContainerTimer(path, list(module.get_submodule(path).children()), device) for path, _ in list_containers(module)
    ]
    with ExitStack() as stack:
        stack.enter_context(forked_rng(device))
        try:
            batch = example_batch(data, min(N_TIMED_ROWS, batch_rows(data)))
        except NoSampleError as why:
            raise NotMeasuredError(str(why)) from None
        for context in (keep_unchanged(module), recorded(module), without_loggers()):
            stack.enter_context(context)
        stack.enter_context(trainer.precision_plugin.train_step_context())
        stack.enter_context(torch.no_grad())
        if device.type != "cpu":
            module.to(device)
        batch = private.on_device(trainer, batch)
        arguments = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
        for _ in range(N_TIMED_RUNS):  # the first run may take longer, and so may any on a busy machine
            with ExitStack() as running:
                for clock in clocks:
                    running.enter_context(clock.time_step())
                module.training_step(copy_batch(batch), *arguments)
    return {clock.path: clock.least for clock in clocks if clock.in_order}


class ContainerTimer:
    """Measures the time of the layers of a container.

    Attributes:
        path: the path of the container.
    """

    def __init__(self, path: str, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.path = path
        self._layers = layers
        self._device = device
        self._least = [math.inf] * len(layers)
        self._called: list[int] = []

    @property
    def least(self) -> float:
        """The seconds of the layers, each in the step in which it was fastest.

        A pause of a busy machine therefore counts only if it comes at the same layer in every step.
        """
        return sum(self._least)

    @property
    def in_order(self) -> bool:
        """Whether all layers were called once and in order in the last step."""
        return self._called == list(range(len(self._layers)))

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Time the layers in the step that the block runs."""
        begun, self._called = 0.0, []

        def before(*_: Any, number: int) -> None:
            nonlocal begun
            self._called.append(number)
            wait_for_device(self._device)
            begun = read_seconds()

        def after(*_: Any, number: int) -> None:
            wait_for_device(self._device)
            self._least[number] = min(self._least[number], read_seconds() - begun)

        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                hooks.callback(layer.register_forward_pre_hook(partial(before, number=number)).remove)
                hooks.callback(layer.register_forward_hook(partial(after, number=number)).remove)
            yield


def warn_about_outside(module: pl.LightningModule, path: str, profile: ModelProfile | None) -> None:
    """Warn if most of the work is outside of the layers that are cut.

    The work is measured by time if a profile exists, and otherwise by the number of parameters.
    """
    if profile is not None:
        inside, of = _measure_share(profile), "the time of a step"
    else:
        whole = work_size(module)
        inside, of = (
            work_size(module.get_submodule(path)) / whole if whole else 1.0,
            "the parameters, embeddings aside,",
        )
    if inside >= MIN_WORK_OF_LAYERS:
        return
    own = work_size(module.get_submodule(path))
    others = {other: size for other, size in list_containers(module) if other != path}
    larger = [other for other, size in others.items() if size > own and profile is None]  # sizes do not show times
    such = f", such as {' or '.join(map(repr, larger[:3]))}" if larger else ""
    chained = "".join(f", *self.{other}" for other in [*others][:3])
    rank_zero_warn(
        f"Only {inside:.0%} of {of} is in the layers of self.{path}. The other {1 - inside:.0%} is not cut into "
        "stages: it stays on the first and the last stage, and all other stages wait for them. Name a container with a "
        f"larger share in PipelineStrategy(module=...){such}, or put all layers that run one after another into "
        "one nn.Sequential" + (f", for example nn.Sequential(*self.{path}{chained}, ...)" if others else "")
    )


def _measure_share(profile: ModelProfile) -> float:
    """Return the share of the time of a step that the layers take."""
    rows = profile.layers[0].forward[-1][0]
    times = [profile.layer_arrays.seconds_at(kind, rows) for kind in (Kind.F, Kind.B)]
    inside = sum(float(column[1:-1].sum()) for column in times)
    whole = sum(float(column.sum()) for column in times)
    return inside / whole if whole else 1.0
