"""A run under way, with what looks after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.about import describe_run, gather_run
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.evaluation import Evaluation
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.peaks import describe_memory
from lightning_pipes.trainer.reports.report import About, Window


@dataclass(frozen=True)
class Running:
    """A run from `setup` of a strategy to its `teardown`.

    Attributes:
        evaluation: evaluates batches in it.
    """

    run: PipelineRun
    stops: StopAgreement
    evaluation: Evaluation

    def step(
        self,
        host: PipelineHost,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        usual: Callable[[Callable[[], Any]], Any],
    ) -> Any:
        """The result of `closure`. The optimizer steps by `usual`, as Lightning has it, unless stages step by
        themselves, or no optimizer does while layers are on their way.
        """
        run, moving = self.run, self.run.relocation
        if run.is_asynchronous:
            with run.step_asked():
                return closure()  # every stage steps by itself when a batch's gradients are complete
        if not moving.pauses():
            return usual(closure)
        result = closure()
        if not moving.pauses():  # layers have arrived before the batch
            return usual(lambda: result)
        private.before_step(host.precision_plugin, run.cut.module, optimizer)
        number, which = run.trainer.fit_loop.total_batch_idx, host.optimizers.index(optimizer)
        moving.takes(number, which, optimizer, run.part.holdings.local)
        return result

    def close(
        self, host: PipelineHost, links: Connections, ranks: Ranks | None, gather: str
    ) -> tuple[Sequence[Sequence[Window]], About] | None:
        """End the run, and return its windows with facts, as `gather_run` gives them.

        The layers are brought together before, as `gather` says. None is returned where the other ranks can't be asked,
        for `ranks` is None then.
        """
        reported = None
        if ranks is not None:
            about = describe_run(host, links.n_trainings)
            reported = gather_run(self.run, ranks.pipeline, host.optimizers, ranks.device, gather, about)
            links.check()
            told = "" if reported is None else describe_memory(*reported)
            if told:
                rank_zero_info(told)
        fault_point("teardown.gathered")
        self.run.close()
        fault_point("teardown.closed")
        return reported
