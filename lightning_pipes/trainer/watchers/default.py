"""The watchers of a run in their order.

This module also defines the short watchers and the watchers of overlapping batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_pipes.ir import Kind, PipelineError
from lightning_pipes.trainer.checks import warn_about_small_batch
from lightning_pipes.trainer.cuts.layers.hidden_state import HiddenState
from lightning_pipes.trainer.loop.asynchronous import AsynchronousLoop
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.uses import Overlap
from lightning_pipes.trainer.loop.watcher import Around, EvaluationWatcher, Step, TrainingStep, Watcher, Watchers
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.user.parameter_hooks import warn_about_hooks
from lightning_pipes.trainer.watchers.batch_comparison import BatchComparison, ReportsDifferences
from lightning_pipes.trainer.watchers.length_times import LengthTimes
from lightning_pipes.trainer.watchers.loss_check import LossCheck, UncomparedLoss
from lightning_pipes.trainer.watchers.padding import Padding
from lightning_pipes.trainer.watchers.replanning import (
    AsynchronousReplanning,
    PredictionCheck,
    Replanning,
    RunStatistics,
)
from lightning_pipes.trainer.watchers.same_batch import SameBatch
from lightning_pipes.trainer.watchers.sample_check import SampleCheck
from lightning_pipes.trainer.watchers.whole_batch import UncomparedValues, WholeBatchValues


class OneStep(Watcher):
    """Refuses batches if the user's code skips, delays or repeats their optimizer step."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._last_number = -1

    def before_batch(self, step: TrainingStep) -> None:
        """Check that this batch requests an optimizer step, for the first time.

        Raises:
            PipelineError: the closure is called outside of `optimizer.step`, or for the second time.
        """
        run, number, last = self._run, step.number, self._last_number
        self._last_number = number
        if (step.complete and not run.awaits_batch) or number == last:
            owner, name = type(run.cut.module).__name__, run.plans.schedule.name
            raise PipelineError(
                f"{owner}.optimizer_step calls the closure of batch {number} {'again' if number == last else ''} "
                f"outside of optimizer.step(closure=...), as if to step later or not at all. With schedule {name!r} "
                "each stage steps as soon as the gradients of a batch are complete there. Call "
                "optimizer.step(closure=optimizer_closure) once for every batch, or use a schedule that flushes "
                "between batches, such as '1f1b'"
            )


class HookChanges(Watcher):
    """Detects hooks that change parameters of batches in flight.

    It compares these parameters before and after the hooks between two batches.
    """

    def __init__(self, training: AsynchronousLoop) -> None:
        self._training = training

    def before_batch(self, step: TrainingStep) -> None:
        """Check that no hook has changed such a parameter since the last batch.

        Raises:
            PipelineError: a hook has changed a parameter.
        """
        self._training.between.check()

    def around_batch(self, step: TrainingStep) -> Around:
        """Record the parameters after the batch has run."""
        return self._noting()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        yield
        self._training.between.begin_hooks(item.use for item in self._training.unstepped_batches.values())


class OverlapWarning(Watcher):
    """Warns of a layer that every batch steps, if batches overlap and use different layers."""

    def __init__(self, run: PipelineRun) -> None:
        self._engine = run.engine
        self._overlap = Overlap()

    def around_batch(self, step: TrainingStep) -> None:
        """Count the layers that this batch steps."""
        self._overlap.count_batch(step.use, self._engine.plan)


class LayersInPlace(Watcher):
    """Refuses to train a module in which other layers have replaced the pipelined ones."""

    def __init__(self, run: PipelineRun) -> None:
        self._cut = run.cut

    def before_batch(self, step: TrainingStep) -> None:
        """Check that the module still contains the pipelined layers."""
        self._cut.check_in_place()


class BufferBroadcast(EvaluationWatcher):
    """Broadcasts the buffers that training changes, before each training batch and before each evaluation."""

    def __init__(self, run: PipelineRun) -> None:
        self._local_layers = run.local_layers

    def around_batch(self, step: Step) -> None:
        """Broadcast the buffers of the first replica to the others."""
        if step.training or step.first:
            self._local_layers.buffers.before_batch()


class FirstBatch(Watcher):
    """Warns of a batch with fewer samples than stages, and of hooks that run in parts if batches overlap."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._warns = True

    def around_batch(self, step: TrainingStep) -> None:
        """Check the first batch. If batches overlap, check the first batch that has several micro-batches."""
        if not self._warns:
            return
        run, plan = self._run, self._run.engine.plan
        if not run.is_asynchronous:
            self._warns = False
            pieces = max(len(plan.spans(Kind.F, stage)) for stage in range(plan.n_stages))
            warn_about_small_batch(step.rows, plan.n_stages, pieces, run.plans.microbatches)
        elif len(plan.spans(Kind.F, 0)) > 1:
            self._warns = False
            warn_about_hooks(run.local_layers.parameters, run.local_layers.reducer)


class SharedState(EvaluationWatcher):
    """Watches objects that layers share in the first batch of training and of evaluation."""

    def __init__(self, hidden: HiddenState) -> None:
        self._hidden = hidden

    def around_batch(self, step: Step) -> Around:
        """Return the context that watches the shared objects during the batch, or None if no watch is due."""
        return self._hidden.batch(step.training) if self._hidden.is_due(step.training) else None


class DeferredErrors(Watcher):
    """Raises the error of a deferred comparison before any optimizer uses the gradients of the batch."""

    def __init__(self, run: PipelineRun) -> None:
        self._connections = run.connections

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Wait for the answers of other ranks."""
        self._connections.check()


def default_watchers(
    run: PipelineRun,
    check_loss: bool,
    by_units: bool,
    uncompared: str,
    prediction: Prediction | None,
    can_sort: bool,
) -> Watchers:
    """Return the watchers of a run, in the order in which each moment calls them.

    The comments below explain the order if it matters. A watcher reads the results of the watchers before it. Because a
    collective call must come at the same place on all ranks, the conditions under which a watcher is added must be the
    same on all ranks.

    Args:
        run: the run.
        check_loss: whether the first batches are compared with their micro-batches.
        by_units: whether the module is cut by units. Then no stage can run a whole batch.
        uncompared: the reason why the loss of no batch is compared; empty if losses are compared.
        prediction: the prediction of the steps of the run; None without one.
        can_sort: whether the settings of the run allow it to sort sequences into micro-batches by length.
    """
    training = run.training_loop
    watchers: list[Watcher] = [
        LayersInPlace(run),
        SameBatch(run),  # before anything that depends on the batch: ranks with different batches would wait forever
    ]
    if isinstance(training, AsynchronousLoop):
        watchers += [OneStep(run), HookChanges(training), AsynchronousReplanning(run, training), OverlapWarning(run)]
    else:
        watchers += [Replanning(run)]
    # The averages include the buffers of each batch.
    if run.local_layers.buffers.has_peers and run.local_layers.replica_averages is None:
        watchers.append(BufferBroadcast(run))
    watchers.append(FirstBatch(run))
    if run.is_fitting and run.token_cutter is None and can_sort:
        watchers.append(Padding(run))
    if run.is_fitting and run.token_cutter is not None and LengthTimes.can_measure(run):
        watchers.append(LengthTimes(run, run.token_cutter))
    if run.local_layers.hidden is not None:
        watchers.append(SharedState(run.local_layers.hidden))
    if run.connections.turns is not None:  # a single training compares immediately
        watchers.append(DeferredErrors(run))  # errors come before warnings
    others: list[ReportsDifferences] = []
    if check_loss and run.is_fitting:
        if uncompared and not run.user_steps.ends_whole:
            watchers.append(UncomparedLoss(run, uncompared))
        if by_units and not run.user_steps.ends_whole and run.user_steps.joint is None:
            watchers.append(UncomparedValues(run) if run.is_asynchronous else WholeBatchValues(run))
        samples = None if by_units else SampleCheck(run)
        if samples is not None:
            watchers.append(samples)
            others.append(samples)
        if run.loss_weights is not None and not uncompared:
            losses = LossCheck(run, run.loss_weights, samples)  # it reads the layouts that `samples` finds
            watchers.append(losses)
            others.append(losses)
        if run.user_steps.joint is None:
            watchers.append(BatchComparison(run, others))  # layers may move after it
    watchers.append(RunStatistics(run))
    if prediction is not None:
        watchers.append(PredictionCheck(run, prediction))  # it reads the windows of RunStatistics
    return Watchers(watchers)
