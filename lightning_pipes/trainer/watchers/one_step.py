"""Where batches overlap, each batch is stepped once, when it has come."""

from __future__ import annotations

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher


class OneStep(Watcher):
    """Refuses batches if the user's code skips, delays or repeats their step."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._last_number = -1

    def before_batch(self, step: TrainingStep) -> None:
        """Look whether an optimizer is asked to step by this batch, for the first time.

        Raises:
            PipelineError: it is not.
        """
        run, number, last = self._run, step.number, self._last_number
        self._last_number = number
        if (step.complete and not run.steps_asked) or number == last:
            owner, name = type(run.cut.module).__name__, run.plans.schedule.name
            raise PipelineError(
                f"{owner}.optimizer_step calls the closure of batch {number} {'again' if number == last else ''} "
                f"outside of optimizer.step(closure=...), as if to step later or not at all. With schedule {name!r} "
                "each stage steps as soon as the gradients of a batch are complete there. Call "
                "optimizer.step(closure=optimizer_closure) once for every batch, or use a schedule that flushes "
                "between batches, such as '1f1b'"
            )
