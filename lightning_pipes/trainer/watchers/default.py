"""The watchers of a run, in their order."""

from __future__ import annotations

from lightning_pipes.trainer.loop.asynchronous import AsynchronousTraining
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import Watcher, Watchers
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.watchers.buffers import BufferBroadcast
from lightning_pipes.trainer.watchers.deferred_errors import DeferredErrors
from lightning_pipes.trainer.watchers.first_batch import FirstBatch
from lightning_pipes.trainer.watchers.hook_changes import HookChanges
from lightning_pipes.trainer.watchers.layers_in_place import LayersInPlace
from lightning_pipes.trainer.watchers.loss_check import LossCheck, UncomparedLoss
from lightning_pipes.trainer.watchers.one_step import OneStep
from lightning_pipes.trainer.watchers.overlap import OverlapWarning
from lightning_pipes.trainer.watchers.prediction import PredictionCheck
from lightning_pipes.trainer.watchers.replanning import Replanning, StreamReplanning
from lightning_pipes.trainer.watchers.same_batch import SameBatch
from lightning_pipes.trainer.watchers.sample_check import SampleCheck
from lightning_pipes.trainer.watchers.shared_state import SharedState
from lightning_pipes.trainer.watchers.statistics import RunStatistics


def default_watchers(
    run: PipelineRun, check_loss: bool, by_units: bool, uncompared: str, prediction: Prediction | None
) -> Watchers:
    """Return the watchers of a run, in the order in which each moment calls them.

    The order matters where a comment says so. A watcher reads what those before it have left; a collective call must
    come at the same place on all ranks, so what decides whether a watcher is here must be the same on all of them.

    Args:
        check_loss: whether first batches are compared with their micro-batches.
        by_units: whether the module is cut by units, of which no stage can run a whole batch.
        uncompared: why the loss of no batch is compared; empty where it is.
        prediction: of the steps of the run; None where there is none.
    """
    training = run.training
    watchers: list[Watcher] = [
        LayersInPlace(run),
        SameBatch(run),  # before anything that depends on the batch: ranks with other batches would wait for ever
    ]
    if isinstance(training, AsynchronousTraining):
        watchers += [OneStep(run), HookChanges(training), StreamReplanning(run, training), OverlapWarning(run)]
    else:
        watchers += [Replanning(run)]
    if run.part.buffers.has_peers:
        watchers.append(BufferBroadcast(run))
    watchers += [FirstBatch(run), SharedState(run)]
    if run.connections.turns is not None:  # a training alone compares at once
        watchers.append(DeferredErrors(run))  # errors of ranks come before what only warns
    if check_loss and run.fitting:
        if uncompared:
            watchers.append(UncomparedLoss(run, uncompared))
        if not by_units:
            watchers.append(SampleCheck(run))
        if run.loss_weights is not None and not uncompared:
            watchers.append(LossCheck(run, run.loss_weights))
    watchers.append(RunStatistics(run))
    if prediction is not None:
        watchers.append(PredictionCheck(run, prediction))  # it reads the windows of RunStatistics
    return Watchers(watchers)
