"""Runs of a user's step before the module is cut, which record, measure and compare its units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_pipes.engine.compute.rng import RngUse, forked_rng, seed_all
from lightning_pipes.engine.private_torch import backward_hooks
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.cuts.steps import loss_of
from lightning_pipes.trainer.cuts.units.batch_end import SampleTrace, UnitAxes, find_axes
from lightning_pipes.trainer.cuts.units.borders import find_slices, match_starts, merge_units
from lightning_pipes.trainer.cuts.units.fake_run import FakeRun
from lightning_pipes.trainer.cuts.units.recording import StepRecord, record_step
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices
from lightning_pipes.trainer.cuts.units.timing import SavedByUnits, UnitCosts, measure_units, shortest
from lightning_pipes.trainer.data.batches import copy_batch, make_cutter, rows_of
from lightning_pipes.trainer.data.sample import (
    NoSampleError,
    batch_rows,
    example_batch,
    first_item,
    is_of_batches,
    load_batch,
    loader_of_batches,
)
from lightning_pipes.trainer.loop.manual import idle_optimizers
from lightning_pipes.trainer.plan.layer_profiler import (
    CollectiveCall,
    NotMeasuredError,
    UnsuitableContainerError,
    without_loggers,
)
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import BATCH
from lightning_pipes.trainer.results.logs import recorded
from lightning_pipes.trainer.results.loss_weights import compare_losses, first_entries, last_trained
from lightning_pipes.trainer.setup.module_setup import SetupContext
from lightning_pipes.trainer.user.unchanged import keep_unchanged
from lightning_pipes.trainer.weights.deferred import has_meta

T = TypeVar("T")

_STEP_NAMES = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
MAX_COMPARED_ROWS = 32
"""The largest number of samples of a batch whose loss is compared with the losses of its parts."""


class UnitRecorder:
    """Runs the user's step on the whole module, without a trace in the module. Most methods are collective.

    Args:
        context: the inputs of the setup.

    Attributes:
        step: the name of the step to record.
        fake: runs steps without values if weights are on `meta`, or None.
        batch_rows: the number of samples of a batch of the run.
        compared_batch: a batch whose loss is compared with the losses of its parts, or None if nothing is compared.
        loss_warning: the reason why training with micro-batches differs from training with one process, or an empty
            text.
        ruled_out_weights: candidates for the weights of micro-batches that do not reproduce the loss of a batch, or
            None if nothing was compared.
        recorded_rows: the number of samples of the batch whose step was recorded.
        unmeasured_reason: the reason why units have no times, or an empty text.
    """

    recorded_rows: int
    _recorded_step: tuple[Callable[..., Any], Callable[[], Any], tuple[Any, ...]]
    """The recorded step, a function that copies its batch, and the remaining arguments of the step."""

    def __init__(self, context: SetupContext) -> None:
        self._context, self._settings = context, context.settings
        self._trainer, self._module, self._ranks = context.trainer, context.module, context.ranks
        self.step = _STEP_NAMES[context.trainer.state.fn or TrainerFn.FITTING]
        is_on_meta = self._ranks.control.any(has_meta(self._module))[0]
        self.fake = FakeRun(self._ranks.device) if is_on_meta else None
        self._run_data: Any = None
        """The data of the run."""
        self.batch_rows = 0
        self.compared_batch: Any = None
        self.loss_warning = ""
        self.ruled_out_weights: frozenset[str] | None = None
        self.unmeasured_reason = ""

    def record(self, request: RunRequest, stages: int) -> StepRecord:
        """Return the record of a step with a batch of the size of one micro-batch."""
        trainer = self._trainer
        data = self._run_data = private.run_data(trainer)  # on all ranks: it may draw random numbers
        if isinstance(data, list) and data and not self._context.is_fitting:  # each loader of the list has its own pass
            data = data[0]
        data = loader_of_batches(data)
        if private.has_delayed_training_data(trainer):
            private.forget_run_data(trainer)

        def run() -> tuple[StepRecord, frozenset[str] | None]:
            try:
                with forked_rng(self._ranks.device):
                    batch = self._example(data, request, stages)
                    cuts = request.microbatches != 1
                    looks = cuts or self._settings.loss == BATCH or self._settings.degrees
                    larger = load_batch(data, MAX_COMPARED_ROWS, streams=True) if looks else None
            except NoSampleError as why:
                raise NotMeasuredError(str(why)) from None
            if larger is not None and rows_of(larger) > MAX_COMPARED_ROWS:  # the items of the dataset are batches
                larger = make_cutter(larger, rows_of(larger))(Span(0, MAX_COMPARED_ROWS))
            with forked_rng(self._ranks.device):  # hooks may draw random numbers for a batch
                self.compared_batch = private.on_device(trainer, larger)
            weighs = larger is not None and cuts and self._settings.check_loss and self._settings.loss != BATCH
            weighs = weighs and self.fake is None  # a comparison needs the values of losses
            return self._record_with(batch), self._rule_out_weights(self.compared_batch) if weighs else None

        try:
            records, ruled_out = zip(*CollectiveCall(self._ranks.control)(run), strict=True)
            if None not in ruled_out:
                self.ruled_out_weights = frozenset().union(*ruled_out)
            record: StepRecord = records[self._ranks.control.position]
            return record
        except NotMeasuredError as why:
            way_out = (
                ". If one plain process trains it, give the Trainer a DataLoader with a batch_size, or put the layers "
                "into one nn.Sequential"
            )
            raise PipelineError(
                f"{type(self._module).__name__} is to be cut by units, but its {self.step} can't be recorded: {why}"
                f"{'' if isinstance(why, UnsuitableContainerError) else way_out}"  # it already contains a solution
            ) from why

    def _example(self, data: Any, request: RunRequest, stages: int) -> Any:
        """Return a batch of the size of one micro-batch, or of the largest micro-batch that may be chosen.

        Raises:
            NoSampleError: the data do not specify the batches.
        """
        if is_of_batches(data):
            batch = first_item(data, streams=True)
            self.batch_rows = rows_of(batch, request.microbatches != 1)
            return batch
        rows = self.batch_rows = batch_rows(data, streams=True)
        if request.measures_sizes:
            return example_batch(data, request.sample_rows(rows, self._ranks.grid.n_planned))
        return example_batch(data, max(-(-rows // min(rows, request.microbatches or 2 * stages)), 1))

    def _record_with(self, batch: Any) -> StepRecord:
        module, device = self._module, self._ranks.device
        if device.type != "cpu" and self.fake is None:
            module.to(device)
        with forked_rng(device):  # hooks may draw random numbers for a batch
            batch = private.on_device(self._trainer, batch)
        run = partial(self.run_without_trace, self._context.is_fitting)
        self.recorded_rows = rows_of(batch, cut=False)
        self._recorded_step = named_step(module, self.step), partial(copy_batch, batch), self.step_arguments()
        return record_step(
            module, run, *self._recorded_step, device, differentiates=self._context.is_manual, fake=self.fake
        )

    def step_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the step after the batch."""
        step = named_step(self._module, self.step)
        of_loader = (0,) if is_param_in_hook_signature(step, "dataloader_idx", explicit=True) else ()
        return (0, *of_loader) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else of_loader

    def run_without_trace(self, training: bool, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs the step of the whole module, and restore the state of the module.

        Args:
            training: the mode in which the module runs.
            work: the function to run.
        """
        module, device = self._module, self._ranks.device
        with ExitStack() as stack:
            stack.enter_context(forked_rng(device))
            for context in (keep_unchanged(module), recorded(module), without_loggers()):
                stack.enter_context(context)
            if self._context.is_fitting:
                stack.enter_context(private.show_training_data(self._trainer, self._run_data))
            if self._context.is_manual:
                stack.enter_context(idle_optimizers(self._trainer, module))
            stack.enter_context(self._trainer.precision_plugin.train_step_context())
            stack.enter_context(torch.enable_grad())
            seed_all(self._settings.seed, device, everything=True)
            modes = {part: part.training for part in module.modules()}
            module.train(training)
            try:
                return work()
            finally:
                for part, mode in modes.items():
                    part.training = mode

    def _rule_out_weights(self, batch: Any) -> frozenset[str] | None:
        """Return the candidates for weights with which the losses of parts do not reproduce the loss of a batch.

        The result is None if the losses cannot be compared, because the step draws random numbers or fails with these
        batches. The reason is logged.
        """
        module, device = self._module, self._ranks.device
        step, draws = named_step(module, "training_step"), RngUse(device)
        arguments = self.step_arguments()

        def compute_loss(part: Any) -> torch.Tensor:
            draws.start()
            with torch.no_grad():
                loss, _ = loss_of(step(copy_batch(part), *arguments))
            draws.stop()
            return loss.detach()

        has_hooks = any(map(backward_hooks, module.modules()))  # they would see gradients of no training step
        trained = [] if has_hooks else last_trained(module.parameters())

        def compute_gradients(part: Any) -> Sequence[torch.Tensor]:
            def run() -> list[torch.Tensor]:
                loss, _ = loss_of(step(copy_batch(part), *arguments))
                return first_entries(torch.autograd.grad(loss, trained, materialize_grads=True))

            return self.run_without_trace(False, run)

        try:
            rows = rows_of(batch)
            if rows < 2:
                return None
            found = compare_losses(
                module,
                batch,
                rows,
                lambda parts: [self.run_without_trace(False, partial(compute_loss, part)) for part in parts],
                compute_gradients if trained else None,
            )
        except Exception as error:  # the user's code may fail with other numbers of samples
            rank_zero_info(f"The loss of {type(module).__name__}.training_step was not compared: {error}")
            return None
        if draws.was_used:
            rank_zero_info(f"The loss of {type(module).__name__}.training_step was not compared: it is drawn at random")
            return None
        if found.unexplained:
            self.loss_warning = (
                f"The loss of {type(module).__name__}.training_step is {found.unexplained}. A batch is trained by the "
                "losses of its micro-batches, so training differs from one process. Set "
                "PipelineStrategy(microbatches=1), or give the module microbatch_weight(batch), which returns the "
                "weight of a micro-batch. PipelineStrategy(check_loss=False) leaves this comparison out"
            )
        return found.wrong

    def measure(self, record: StepRecord, request: RunRequest) -> dict[int, UnitCosts]:
        """Return the costs of all units by the number of samples, or an empty dict if the step cannot be measured.

        To choose a schedule or the micro-batches of each stage, the step is measured with several numbers of samples,
        because times are not proportional to them.
        """
        rows, sizes = self.recorded_rows, {self.recorded_rows}
        if self.fake is not None:  # the cost of a unit is estimated from its operations
            self.unmeasured_reason = f"weights of {type(self._module).__name__} are on meta until the module is cut"
            return {}
        if request.measures_sizes:
            wanted = request.microbatch_rows(self.batch_rows, self._ranks.grid.n_planned)
            sizes |= {size for size in wanted if size < rows}
        found: dict[int, UnitCosts] = {}
        for size in sorted(sizes, reverse=True):
            try:
                of_ranks = CollectiveCall(self._ranks.control)(
                    partial(self._measure_size, record, size, request.splits_backward)
                )
            except NotMeasuredError as why:
                rank_zero_info(f"Units of {type(self._module).__name__} were not measured with {size} samples: {why}")
                self.unmeasured_reason = str(why)
                continue
            known = [each for each in of_ranks if each is not None]
            if len(known) == len(of_ranks):
                found[size] = UnitCosts(shortest(*(each.seconds for each in known)), known[0].saved)
            elif size == rows:
                self.unmeasured_reason = f"{self.step} took another path than when its units were recorded"
                return {}
        return found if rows in found else {}

    def _measure_size(self, record: StepRecord, size: int, split: bool) -> UnitCosts | None:
        """Return the costs of the units for this number of samples, or None if the step then has other units."""
        module, device, rows = self._module, self._ranks.device, self.recorded_rows
        step, make_batch, arguments = self._recorded_step
        if size < rows:
            make_batch = partial(copy_batch, make_cutter(make_batch(), rows)(Span(0, size)))
        run = partial(self.run_without_trace, True)
        seconds = measure_units(module, record, run, step, make_batch, arguments, device, _measured_loss, split)
        if seconds is None:
            return None
        counter = SavedByUnits(_named(module, record.atomic))
        return UnitCosts(seconds, run(partial(counter.measure, module, step, make_batch, arguments)))

    def merge(
        self, record: StepRecord, starts: tuple[int, ...], layers: Sequence[str] = ()
    ) -> tuple[StepRecord, tuple[int, ...], SequentialSlices | None]:
        """Return a record in which each module that is not divided by a border is one unit.

        The borders in this record are also returned, and the layers among `layers` that are units together.
        """
        module, device = self._module, self._ranks.device
        run = partial(self.run_without_trace, self._context.is_fitting)
        slices, places = find_slices(module, record, starts, layers)
        choose = partial(merge_units, module, record, starts, layers=() if slices is None else slices.layers)

        def record_merged() -> StepRecord:
            return record_step(
                module, run, *self._recorded_step, device, choose, self._context.is_manual, self.fake, slices
            )

        try:
            merged: StepRecord = CollectiveCall(self._ranks.control)(record_merged)[self._ranks.control.position]
        except NotMeasuredError:  # the user's code runs differently now, so units stay as they are
            return record, starts, None
        found, names = match_starts(record, merged, starts, places), [unit.name for unit in merged.units]
        if not places.keys() <= {*names}:
            found = None
        of_ranks = self._ranks.control.all_gather((found, names))
        if found and all(other == of_ranks[0] for other in of_ranks):
            return merged, found, slices
        return (record, starts, None) if slices is None else self.merge(record, starts)

    def trace_samples(self, atomic: tuple[str, ...], slices: SequentialSlices | None = None) -> list[UnitAxes]:
        """Return the places of samples in the tensors that units make.

        The list is empty if the step cannot run with parts of a batch, and the reason is logged.
        """
        module, device = self._module, self._ranks.device
        step, batch, arguments = named_step(module, "training_step"), self.compared_batch, self.step_arguments()
        try:
            rows = rows_of(batch)
            part = make_cutter(batch, rows)(Span(0, rows // 2))
            traces = [
                self.run_without_trace(
                    True,
                    partial(
                        SampleTrace(module, _named(module, atomic), device, slices).run,
                        step,
                        copy_batch(each),
                        arguments,
                    ),
                )
                for each in (part, batch)
            ]
        except Exception as error:  # the user's code may fail with other numbers of samples
            rank_zero_info(f"{type(module).__name__}.training_step was not traced with parts of a batch: {error}")
            return []
        return find_axes(traces[0], rows // 2, traces[1], rows)

    def check_same(self, record: StepRecord) -> None:
        """Compare the records of all ranks.

        Raises:
            PipelineError: the records differ.
        """
        ranks = self._ranks.control.ranks
        names = self._ranks.control.all_gather([unit.name for unit in record.units])
        for rank, other in zip(ranks, names, strict=True):
            if other != names[0]:
                shorter = min(len(names[0]), len(other))
                at = next((n for n in range(shorter) if names[0][n] != other[n]), shorter)
                raise PipelineError(
                    f"{self.step} takes a different path on rank {rank} than on rank {ranks[0]}, starting with unit "
                    f"{at}, although the samples are the same. Control flow may depend only on the batch, the weights, "
                    "and torch's random numbers"
                )


def _named(module: nn.Module, paths: Collection[str]) -> dict[str, nn.Module]:
    return {path: module.get_submodule(path) for path in paths}


def _measured_loss(out: Any) -> torch.Tensor:
    if out is None:
        raise NotMeasuredError("training_step returns None for the first samples")
    return loss_of(out)[0]
