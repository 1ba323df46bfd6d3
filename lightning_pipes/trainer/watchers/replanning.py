"""Statistics of the last batches, and the resulting decisions of planners: a revised plan or a corrected cut."""

from __future__ import annotations

from collections import deque

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipes.cost.units import bytes_text
from lightning_pipes.planning.replanning import FreeBytes
from lightning_pipes.trainer.loop.adopting import adopt_cut
from lightning_pipes.trainer.loop.asynchronous import AsynchronousLoop
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_statistics import batches_left
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.reports.report import MAX_REPORTED_STEPS, Window
from lightning_pipes.trainer.reports.timing import Share


class Replanning(Watcher):
    """Gives each batch its plans.

    These are the plans of the run, which the planner may revise unless layers are moving.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def before_batch(self, step: TrainingStep) -> None:
        """Call the planner if it is due, and begin or finish the move that its plan requires."""
        run, relocation = self._run, self._run.relocation
        if not relocation.is_moving:
            run.plans = self._revised_plans(step)
        elif relocation.is_over(run.plans, step.number):
            run.finish_move(step.number)
        step.plans = relocation.plans_for(run.plans, step.number)

    def _revised_plans(self, step: TrainingStep) -> Plans:
        run, plans = self._run, self._run.plans
        if plans.guards_memory:
            found = self._plans_for_memory(step, run.statistics.gather_free_bytes(plans.for_rows(step.rows)[0]))
            if found is not plans:
                return found
        if not plans.is_due(step.number):
            return plans
        observations = run.statistics.observe_plan(plans.for_rows(step.rows)[0])
        return plans.revise(step.rows, observations, batches_left(run.trainer))

    def _plans_for_memory(self, step: TrainingStep, free: FreeBytes) -> Plans:
        """Return plans that move layers off devices that are short of memory.

        In most cases these are the plans of the run.
        """
        plans = self._run.plans
        return plans.reduce_memory(step.rows, self._run.statistics.recall_plan(plans.for_rows(step.rows)[0]), free)


class AsynchronousReplanning(Replanning):
    """Revises the plans of overlapping batches.

    The planner is called after all ranks have published their statistics.
    """

    def __init__(self, run: PipelineRun, training: AsynchronousLoop) -> None:
        super().__init__(run)
        self._training = training
        self._seen_by = run.plans
        self._free: deque[FreeBytes] = deque(maxlen=1 + run.plans.every)
        self._serialized_at = 0

    def _revised_plans(self, step: TrainingStep) -> Plans:
        run, plans, engine, statistics = self._run, self._run.plans, self._run.engine, self._training.statistics
        if plans is not self._seen_by:  # layers have moved in the meantime
            statistics.drop_observation()
            self._seen_by = plans
        if plans.guards_memory:
            revised = self._guard_memory(step)
            if revised is not plans:
                return revised
        if plans.is_due(step.number) and not statistics.is_pending:
            plan, order = plans.for_rows(engine.plan.jobs[0].rows if engine.is_open else step.rows)
            statistics.start_observation(step.number, Window(plan, order, engine.events_so_far))
        found = statistics.collect_observations(step.number, step.rows, flushed=not engine.is_open)
        if found is None:
            return plans
        return plans.revise(step.rows, found, batches_left(run.trainer))

    def _guard_memory(self, step: TrainingStep) -> Plans:
        """Run batches one by one while memory is short, and move layers away if that is not enough (DynPipe, S V-B2).

        Without overlap, the weights of earlier versions are not kept either.
        """
        plans, training = self._run.plans, self._training
        free = training.statistics.collect_free_bytes(step.number, plans.for_rows(step.rows)[0])
        if free is None:
            return plans
        self._free.append(free)
        self._serialize(step.number, plans.should_serialize_batches(tuple(self._free), training.serialized), free)
        # From this batch on, the statistics are from batches that ran one by one.
        helps_at = self._serialized_at + 2 * self._run.relocation.max_lag + 1
        if not training.serialized or step.number < helps_at:
            return plans
        return self._plans_for_memory(step, free)

    def _serialize(self, batch: int, serialized: bool, free: FreeBytes) -> None:
        """Begin or stop running batches one by one."""
        if serialized != self._training.serialized:
            self._serialized_at = batch
            known = ", ".join(f"{bytes_text(each)} on rank {n}" for n, each in enumerate(free) if each is not None)
            rank_zero_warn(
                f"free memory is low ({known}), so batches run one by one. Use recompute=True or a smaller batch "
                "size to let them overlap"
                if serialized
                else f"memory is free again ({known}), so batches overlap again"
            )
        self._training.serialized = serialized


class RunStatistics(Watcher):
    """Keeps the windows of a run with a flush after every batch."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def after_batch(self, step: TrainingStep) -> None:
        """Keep the events of the batch and its duration."""
        run, window = self._run, step.window
        if window is None:
            return
        run.windows.append(window)
        if run.plans.every:
            run.statistics.add(window)
        if len(run.took) < MAX_REPORTED_STEPS:
            run.took.append(Share.from_events(window.events).took)


class PredictionCheck(Watcher):
    """Compares the first steps with their prediction.

    It reads the windows of `RunStatistics`, and therefore runs after it.
    """

    def __init__(self, run: PipelineRun, prediction: Prediction) -> None:
        self._run, self._prediction = run, prediction

    def after_batch(self, step: TrainingStep) -> None:
        """Adopt the corrected decision that the measured steps imply, starting with the next batch."""
        run = self._run
        found = self._prediction.correct_decision(run.windows)
        if found is not None:
            run.decision = found
            run.took.clear()
            adopt_cut(run, found.layers, found.rows)
