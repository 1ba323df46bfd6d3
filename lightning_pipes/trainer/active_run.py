"""The current run, with its stop agreement and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_pipes.engine.allocator import read_peak_bytes
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.planning.formatting import schedule_settings
from lightning_pipes.sim.records.record import PADDING_FACT
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.evaluation import Evaluation
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.relocation.gathering import gather_layers
from lightning_pipes.trainer.reports.report import RunInfo, Window, describe_memory


@dataclass(frozen=True)
class ActiveRun:
    """A run between the `setup` and the `teardown` of a strategy.

    Attributes:
        run: the run, with its stages and its training loop.
        stops: the agreement of all ranks about when the run ends.
        evaluation: evaluates batches of validation, test and prediction.
    """

    run: PipelineRun
    stops: StopAgreement
    evaluation: Evaluation

    def step_optimizer(
        self,
        host: PipelineHost,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        take_step: Callable[[Callable[[], Any]], Any],
    ) -> Any:
        """Run `closure`, which trains a batch, and then step the optimizer with `take_step`.

        The optimizer is not stepped if the stages step their own optimizers, or while a transfer of layers defers
        steps.

        Args:
            host: the strategy.
            optimizer: the optimizer to step.
            closure: trains a batch.
            take_step: the optimizer step of Lightning, which first runs the closure that it is called with.

        Returns:
            The result of `take_step`, or the result of the closure if the step is not taken.
        """
        run, moving = self.run, self.run.relocation
        if run.is_asynchronous:
            with run.expect_batch():
                return closure()  # each stage takes its step once the gradients of a batch are complete
        if not moving.defers_steps():
            return take_step(closure)
        result = closure()
        if not moving.defers_steps():  # the layers arrived before the batch
            return take_step(lambda: result)
        private.before_step(host.precision_plugin, run.cut.module, optimizer)
        number, which = run.trainer.fit_loop.total_batch_idx, host.optimizers.index(optimizer)
        moving.defer_step(number, which, optimizer, run.local_layers.holdings.local)
        return result

    def close(
        self, host: PipelineHost, connections: Connections, ranks: Ranks | None, gather: str
    ) -> tuple[Sequence[Sequence[Window]], RunInfo] | None:
        """End the run and return the result of `gather_run`: its windows and facts.

        The layers are gathered first, as `gather` specifies.

        Args:
            host: the strategy.
            connections: the connections to the other ranks.
            ranks: the ranks of the run, or None if the other ranks can no longer be reached. Nothing is gathered then.
            gather: the ranks that get the whole module; see `gather_layers`.

        Returns:
            The windows and the facts, or None if `ranks` is None or nothing was trained.
        """
        reported = None
        if ranks is not None:
            about = describe_run(host, connections.n_siblings)
            reported = gather_run(self.run, ranks.pipeline, host.optimizers, ranks.device, gather, about)
            connections.check()
            memory_text = "" if reported is None else describe_memory(*reported)
            if memory_text:
                rank_zero_info(memory_text)
        fault_point("teardown.gathered")
        self.run.close()
        fault_point("teardown.closed")
        return reported


def describe_run(strategy: PipelineHost, siblings: int) -> RunInfo:
    """Return the facts about a run that this rank can determine without other ranks.

    Args:
        strategy: the strategy of the run.
        siblings: the number of siblings that train at a time, including this one.
    """
    device, plugin = strategy.root_device, strategy.precision_plugin
    threads = torch.get_num_threads()
    facts = {
        "module": type(strategy.lightning_module).__name__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {threads} thread{'s' if threads > 1 else ''} a rank",
        "precision": str(plugin.precision),
        "replicas": str(strategy.grid.replicas) if strategy.grid.replicas > 1 else "",
        "on the device": "" if strategy.memory is None or siblings > 1 else strategy.memory.usage_text,
        "array": f"{siblings} siblings at a time" if siblings > 1 else "",
        "finished": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    }
    schedule, decision = strategy.schedule, strategy.decision
    return RunInfo(
        schedule.name,
        schedule_settings(schedule),
        profile=decision.profile,
        facts={k: v for k, v in facts.items() if v},
        choice="\n".join(filter(None, [decision.table, decision.why, decision.cut_reason])) if decision.profile else "",
        predicted=decision.predict_step(),
        unpredicted=_explain_missing_prediction(decision),
        siblings=siblings,
    )


def _explain_missing_prediction(decision: Decision) -> str:
    """Return the reason why a decision has no predicted step, as a clause."""
    if decision.profile is not None:
        return "batches overlap, so that there is no single step to predict"
    why = f" ({decision.why})" if decision.why else ""
    return f"the layers were not measured before training{why}"


def gather_run(
    run: PipelineRun,
    pipeline: Control,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    gather: str,
    about: RunInfo,
) -> tuple[list[tuple[Window, ...]], RunInfo] | None:
    """Gather the layers, and return the windows of every rank of the pipeline with the facts about the run.

    This function is collective over the ranks of the pipeline. The result is None if nothing was trained.

    Args:
        run: the run that ends.
        pipeline: the control channel of the ranks of the pipeline.
        optimizers: the optimizers of this rank.
        device: the device of this rank.
        gather: the ranks that get the whole module; see `gather_layers`.
        about: the facts from `describe_run`.
    """
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    curves = None if run.statistics.monitor is None else run.statistics.monitor.to_curves()
    moved = "; ".join(map(str, run.relocation.moved))
    if moved:
        about = replace(about, facts={**about.facts, "moved": moved})
    if run.padding_text:
        about = replace(about, facts={**about.facts, PADDING_FACT: run.padding_text})
    facts = None
    if run.windows:
        facts = (
            tuple(run.windows),
            tuple(run.took),
            run.stage_bytes(optimizers),
            memory,
            curves,
            run.weighed_by,
            read_peak_bytes(device),
        )
    unsaved = run.cut.unsaved(run.local_layers.holdings.local)
    gathered = pipeline.all_gather((unsaved, facts))
    run.cut.take_unsaved({k: v for buffers, _ in gathered for k, v in buffers.items() if k not in unsaved})
    gather_layers(run.local_layers, pipeline, gather)
    if facts is None:
        return None
    ranks = [gathered[pipeline.ranks.index(rank)][1] for rank in run.global_ranks]
    windows, took, held, memories, seen, weighed, peaks = zip(*ranks, strict=True)
    stages = {number: size for found in held for number, size in found.items()}
    steps = [max(step) for step in zip(*took, strict=True)]
    measured = median(steps) / 1e9 if steps else None
    monitored = () if any(c is None for c in seen) else seen
    weights = next(filter(None, weighed), "")
    if weights:
        about = replace(about, facts={**about.facts, "micro-batches weighted by": weights})
    about = replace(about, stages=stages, memory=memories, measured=measured, monitored=monitored, peaks=peaks)
    about = replace(about, steps=len(steps))
    return list(windows), about
