"""Connections of a sibling, and the choice of its container and its cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_pipes.arrays.siblings.sibling import MisfitError, Sibling, SiblingWatch, wait_in_turn
from lightning_pipes.engine.engine import Turns, Watch
from lightning_pipes.engine.messages.mailbox import Transport
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.planning.partition import partition_at
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.connections import Connections, MakeControl
from lightning_pipes.trainer.loop.stopping import StopAgreement, check_ends
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.ranks.control import Control, PendingGather
from lightning_pipes.trainer.user.hooks import HOOKS


def join(
    sibling: Sibling[Any], trainer: pl.Trainer, rank: int, ranks: int, make_watch: Callable[[], FailureWatch]
) -> Connections:
    """Return the connections for a sibling's run.

    They are created when they are needed, except for the watch, which the first sibling creates.
    """
    return SiblingConnections(sibling, trainer, sibling.array.shared.get_watch(make_watch, rank, ranks))


class SiblingConnections(Connections):
    """Connections of a sibling of an array. When the sibling ends, the next sibling can use them again."""

    def __init__(self, sibling: Sibling[Any], trainer: pl.Trainer, watch: FailureWatch) -> None:
        super().__init__(watch)
        self.sibling = sibling
        self.trainer = trainer

    @property
    @override
    def n_siblings(self) -> int:
        return self.sibling.array.size

    @override
    def connect(self, make: MakeControl) -> Control:
        array = self.sibling.array
        descriptions = self.sibling.meet_peers(array.shared.describe_free_controls(array.size))
        control = array.shared.take_control(descriptions, partial(make, self.watch, wait_in_turn))
        self.sibling.trainer = self.trainer
        private.remove_progress_bars(self.trainer)
        return control

    @override
    def connect_eagerly(self, pipeline: Control) -> None:
        pipeline.connect_broadcasts()

    @override
    def waits_at(self, barrier: str | None) -> bool:
        return has_purpose(barrier, self.trainer)

    @property
    @override
    def is_terminated_by_signal(self) -> bool:
        return self.sibling.array.is_terminated

    @override
    def complete_request(self, request: RunRequest, ranks: int) -> RunRequest:
        return with_default_microbatches(request, self.sibling, ranks)

    @property
    @override
    def computes_alone(self) -> bool:
        return "decisions" not in self.sibling.array.shared.facts

    @override
    def agree_on_container(self, module: pl.LightningModule, find: Callable[[], str]) -> str:
        return find_shared_container(self.sibling, module, find)

    @override
    def agree_on_decision(
        self, module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]
    ) -> Decision:
        return decide_shared_cut(self.sibling, module, plain, decide)

    @override
    def share_work_of_others(self) -> Sequence[float]:
        seconds = self.sibling.array.shared.stage_loads.sum_seconds()
        found: list[float] = json.loads(self.sibling.meet_peers(json.dumps(seconds))[0])
        return found

    @override
    def find_tensor(self, source: Hashable, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        return self.sibling.array.shared.tensors.find(source, dtype, device)

    @override
    def share_tensors(self, module: nn.Module, sources: Mapping[int, Hashable]) -> None:
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self.sibling.array.shared.tensors.share(self.sibling.index, tensors, sources)

    @override
    def check_asynchronous(self, schedule: str) -> None:
        raise PlanError(
            f"{schedule} does not flush between batches, but siblings of an array must. Other siblings use the idle "
            "time of a stage, so choose 'jap' or '1f1b'"
        )

    @override
    def open_transport(self, make: Callable[[], Transport]) -> Transport:
        return self.sibling.array.shared.get_transport(make)

    @property
    @override
    def engine_watch(self) -> Watch:
        return SiblingWatch(self.sibling, self.watch)

    @property
    @override
    def turns(self) -> Turns | None:
        return self.sibling

    @override
    def check_later(self, is_ready: Callable[[], bool], check: Callable[[], object], max_turns: int) -> None:
        self.sibling.check_later(is_ready, check, max_turns)

    @override
    def check(self) -> None:
        self.sibling.check()

    @override
    def make_agreement(self, trainer: pl.Trainer, stops: StopAgreement, control: Control) -> Callable[[], None]:
        return SiblingAgreement(trainer, stops, control, self.sibling).agree

    @override
    def release_state(self) -> None:
        self.sibling.array.release_sibling(self.sibling.index)

    @override
    def trim_memory_later(self) -> None:
        self.sibling.leaves_free_memory = True

    @override
    def release_control(self, control: Control | None, peers_ended: bool) -> None:
        if control is not None and not peers_ended:
            self.sibling.array.shared.return_control(control)

    @override
    def renew_control(self, control: Control) -> None:
        pass

    @override
    def report_failure(self, error: BaseException) -> None:
        self.sibling.report_failure(error)


class SiblingAgreement:
    """Let ranks agree on stops without waiting for each other, unless there is a reason to stop.

    If one sibling waited for other ranks, it would delay the turns of all siblings. Each rank therefore starts an
    exchange after each batch and evaluates the result later.

    A stop that all ranks request after the same batch takes effect immediately, for example the stop of a callback that
    looks at metrics. A stop that only some ranks request cannot be honored, because the other ranks have already
    continued.
    """

    def __init__(self, trainer: pl.Trainer, stops: StopAgreement, control: Control, sibling: Sibling[object]) -> None:
        self._trainer = trainer
        self._stops = stops
        self._control = control
        self._sibling = sibling
        self._last_answer: tuple[int, PendingGather[list[bool]]] | None = None

    def agree(self) -> None:
        """Make all ranks stop after this call, or none of them.

        Raises:
            PipelineError: only some ranks requested a stop after this batch, or the epoch ended with this batch on some
                ranks only. If this rank did not request a stop, the error is raised later.
        """
        flags = self._stops.stop_flags()
        batch = self._trainer.fit_loop.batch_idx
        before, self._last_answer = self._last_answer, (batch, self._control.start_any(*flags, not flags[0]))
        if before is not None:
            self._stops.apply_flags(_agreed(*before), before[0])
        batch, answer = self._last_answer
        if flags[0]:
            self._last_answer = None
            self._stops.apply_flags(_agreed(batch, answer), batch)
        else:
            self._sibling.check_later(answer.has_arrived, lambda: _agreed(batch, answer), max_turns=0)


def _agreed(batch: int, answer: PendingGather[list[bool]]) -> list[bool]:
    *found, some_go_on = answer()
    if found[0] and some_go_on:
        raise PipelineError(
            f"trainer.should_stop was set on some ranks only after batch {batch}. In a job array, all ranks must set "
            "it after the same batch. Decide with values that are equal on all ranks, such as logged metrics, or send "
            "the decision of one rank to all ranks with trainer.strategy.broadcast"
        )
    check_ends(found, batch)
    return found


_HOOKS_BEFORE_BARRIER = {"run-stage": (), **{row.barrier: (row.name,) for row in HOOKS if row.barrier is not None}}
"""The hooks that run before each barrier, by the name of the barrier.

These are the hooks since the previous barrier, or since the exchange of the starting weights.
"""
_LIBRARY_PREFIXES = ("lightning.", "lightning_pipes.")


def has_purpose(name: str | None, trainer: pl.Trainer) -> bool:
    """Return whether code of the user may rely on the barrier of this name."""
    if name not in _HOOKS_BEFORE_BARRIER:
        return True
    if name == "_CheckpointConnector.resume_end" and trainer.ckpt_path is not None:
        return True  # no rank may overwrite the checkpoint before all ranks have read it
    parts = (trainer.lightning_module, getattr(trainer, "datamodule", None), *private.callbacks(trainer))
    return any(_is_users(hook, part) for part in parts for hook in _HOOKS_BEFORE_BARRIER[name])


def _is_users(hook: str, part: object) -> bool:
    owner = next((cls for cls in type(part).__mro__ if hook in vars(cls)), None)
    return hook in getattr(part, "__dict__", ()) or (
        owner is not None and not owner.__module__.startswith(_LIBRARY_PREFIXES)
    )


Structure = dict[str, tuple[tuple[int, ...], str]]
"""The shape and dtype of every parameter, by name."""


def with_default_microbatches(request: RunRequest, sibling: Sibling[object], ranks: int) -> RunRequest:
    """Return a sibling's request with the array's number of micro-batches, if the sibling does not set a number.

    The first sibling that uses the default logs the number.
    """
    if request.microbatches is not None or request.chooses or planner_of(request.schedule).user_chose_microbatches:
        return request
    stages = len(request.schedule.place_stages(ranks))
    chosen = sibling.array.count_default_microbatches(stages)
    if sibling.array.shared.facts.setdefault("default_microbatches", sibling.index) == sibling.index:
        rank_zero_info(
            f"JobArray: PipelineStrategy(microbatches=...) is not set, so the array cuts each batch into {chosen} "
            "micro-batches. A run outside of the array may use a different number, which changes the last digits of "
            f"results, dropout masks and the statistics of BatchNorm. Set microbatches={chosen} in both if their "
            "results must be bitwise equal"
        )
    return replace(request, microbatches=chosen)


def find_shared_container(sibling: Sibling[object], module: pl.LightningModule, find: Callable[[], str]) -> str:
    """Return the path of the container of an earlier sibling with equal parameters, or `find()` if there is none."""
    found: dict[object, str] = sibling.array.shared.facts.setdefault("containers", {})
    key = (type(module), *_structure(module).items())
    if key not in found:
        found[key] = find()
    return found[key]


def decide_shared_cut(
    sibling: Sibling[object], module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]
) -> Decision:
    """Return the decision for a sibling, with its own schedule and micro-batches.

    Siblings with equal parameters that request the same cut share one cut. Any other sibling has its own cut, and so
    does a sibling whose units were measured, because its cut was chosen before. If the
    layers of this sibling were measured, its cut gives most work to the stages that have the least work from the other
    siblings, so that all stages of the array are equally busy.

    Args:
        sibling: the sibling.
        module: the sibling's model.
        plain: the decision that follows from the sibling's settings alone.
        decide: makes a complete decision. It is called once for each requested cut of each structure.

    Raises:
        MisfitError: the array runs in rounds, and the stages of the sibling are on other ranks than the stages of the
            first sibling.
    """
    own, shared = _structure(module), sibling.array.shared
    first, ranks, schedule = shared.facts.setdefault("first", (sibling.index, plain.ranks, plain.schedule.name))
    if sibling.array.runs_in_rounds and plain.ranks != ranks:
        raise MisfitError(
            f"sibling {sibling.index} of the array has its stages on the ranks {plain.ranks}, with schedule "
            f"{plain.schedule.name!r}, but sibling {first} has them on the ranks {ranks}, with schedule {schedule!r}. "
            "In rounds, the stages of all siblings must be on the same ranks. Choose a schedule with the same number "
            "of stages, leave out rounds=, or run this sibling in another array"
        )
    decisions: dict[object, tuple[int, Decision]] = shared.facts.setdefault("decisions", {})
    key = (*own.items(), plain.ranks, plain.layers, plain.stage_seconds)
    if key not in decisions:
        decisions[key] = sibling.index, _level_work(sibling, decide())
    decider, decision = decisions[key]
    if decider != sibling.index:
        decision = replace(
            decision,
            schedule=plain.schedule,
            microbatches=plain.microbatches,
            recompute=plain.recompute,
            late_recompute=plain.late_recompute,
            seconds=None,
            computing=None,
            cut_reason="",
        )
    shared.stage_loads.begin_sibling(sibling.index, decision)
    return decision


def _level_work(sibling: Sibling[object], decision: Decision) -> Decision:
    """Return the decision of a sibling with the cut that levels the work of all siblings, as computed on rank 0.

    Ranks may learn at different times that another sibling has failed, so that they would choose different cuts.
    """
    cut = sibling.array.shared.stage_loads.level_cut(decision)
    agreed = json.loads(sibling.meet_peers(json.dumps([span.start for span in cut[1:]]))[0])
    if agreed == [span.start for span in decision.layers[1:]]:
        return decision
    rank_zero_info(
        f"JobArray: the stages of sibling {sibling.index} begin at layers {agreed}, so that all ranks have the same "
        "amount of work from all siblings"
    )
    layers = partition_at(agreed, decision.layers[-1].stop, len(cut))
    return replace(decision, layers=layers, seconds=None, computing=None, cut_reason="")


def _structure(module: pl.LightningModule) -> Structure:
    return {name: (tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()}
