"""A second run of a training batch through the same stages, with gradients and without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils import _pytree as pytree

from lightning_pipes.engine.allocator import trimmed_heap
from lightning_pipes.engine.compute.rng import BEFORE_LAYERS, comparable_state, forked_rng
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.messages.message import FrozenLeaf
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.engine.trees import SentWhole
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import Span
from lightning_pipes.trainer.cuts.steps import StepResult, TrainingBatch
from lightning_pipes.trainer.data.batches import copy_batch
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep
from lightning_pipes.trainer.private_lightning import is_spectral_norm
from lightning_pipes.trainer.user.parameter_hooks import without_hooks
from lightning_pipes.trainer.user.unchanged import keep_unchanged
from lightning_pipes.trainer.verify.record import ModuleParts, Phase, ValueKey
from lightning_pipes.trainer.verify.reference import perturb_weights
from lightning_pipes.trainer.verify.sample_draws import SampleDraws
from lightning_pipes.trainer.verify.verifier import spans_of_stage


@dataclass(eq=False)
class StageFailure(SentWhole, FrozenLeaf):
    """The message of a stage that could not run its part of a batch."""

    reason: str


@dataclass
class RepeatedValues:
    """The values of a second run of a batch on this rank.

    Attributes:
        gradients: the gradients of the parameters of this rank.
        results: the results of the step for each micro-batch, on the last stage.
        failure: the reason why a stage could not run. Empty if all stages ran.
        other_draws: the random numbers that do not belong to particular samples. Empty if there are none.
        by_sample: whether random numbers of particular samples were drawn.
    """

    gradients: dict[ValueKey, torch.Tensor] = field(default_factory=dict)
    results: dict[Span, StepResult] = field(default_factory=dict)
    failure: str = ""
    other_draws: str = ""
    by_sample: bool = False


class RepeatedStage(Stage):
    """A stage of a second run. Its failures do not end the training.

    Args:
        of: the stage of the training.
        run: the run of the pipeline.
        rows: the number of samples in the batch.
        made: receives failures and random numbers of the stage.
        draws: draws the random numbers of micro-batches for a whole batch; None if the batch runs in micro-batches.
    """

    def __init__(self, of: Stage, run: PipelineRun, rows: int, made: RepeatedValues, draws: SampleDraws | None) -> None:
        # A bound method would be a reference cycle, which keeps gradients alive.
        body: Any = RepeatedStage._run_body
        seed, device = of.seed, of.device
        super().__init__(of.number, of.layers, body, show_version=of.show_version, seed=seed, device=device)
        self._user_body = run.user_steps.stage_body(of.number)
        self._is_last = of.number == run.engine.plan.n_stages - 1
        self._made, self._draws, self._spans = made, draws, spans_of_stage(run.engine.plan, of.number, rows)
        self._seeded: Any = None
        self._sent: dict[Span, Any] = {}
        """The message for each micro-batch without the values of its tensors, if the stage runs again."""

    def seed_generators(self, layer: int, seed: int) -> None:
        if self._draws is None:
            super().seed_generators(layer, seed)
        else:
            self._draws.enter(layer, self._spans)
        if layer == BEFORE_LAYERS:
            self._seeded = _other_generators()

    def read_generators(self) -> list[torch.Tensor]:
        return super().read_generators() if self._draws is None else self._draws.read_generators()

    def set_generators(self, states: Sequence[torch.Tensor]) -> None:
        if self._draws is None:
            super().set_generators(states)
        else:
            self._draws.set_generators(states, self._spans)

    def _run_body(self, item: Item, span: Span, received: Any) -> Any:
        earlier = self._sent.get(span)
        for failure in (received, earlier):
            if isinstance(failure, StageFailure):
                return self._fail(failure, span)
        self._seeded = _other_generators()
        try:
            with self._draw_context():
                out = self._user_body(self, item, span, received)
                if _other_generators() != self._seeded:
                    self._made.other_draws = "Python's or NumPy's random numbers"
        except PeerFailure:
            raise
        except Exception as error:
            self._made.failure = self._made.failure or f"{type(error).__name__}: {error}"
            if not self.recomputing:
                return self._fail(StageFailure(self._made.failure), span)
            return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=self.device), earlier)
        if self.runs_again:
            self._sent[span] = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), out)
        return out

    def _fail(self, failure: StageFailure, span: Span) -> Any:
        self._sent[span] = failure
        return torch.zeros((), device=self.device) if self._is_last else failure

    def run_backward(self, item: Item, versions: Any, run: Any, run_forward: Any) -> None:
        try:
            with self._draw_context():
                run()
        except PeerFailure:
            raise
        except Exception as error:
            self._made.failure = self._made.failure or f"{type(error).__name__}: {error}"

    def _draw_context(self) -> AbstractContextManager[None]:
        return nullcontext() if self._draws is None else self._draws.draw_by_sample()


class RepeatedBatch:
    """Runs a training batch again, in micro-batches or as a whole, after its gradients are complete.

    Both runs begin with the same state of the module, and draw the same random numbers for each sample. The state of
    the module, its gradients and all random generators are restored afterwards. Batch norms use their running
    statistics, and spectral norms keep their estimates, because their results depend on the number of samples by
    definition. If micro-batches are cropped to their longest sequences, all modules are in evaluation mode, because
    dropout would draw different numbers for a whole batch. Collective.

    Args:
        run: the run of the pipeline.
        parts: the parameters of this rank.
        step: the batch.
        batch: a copy of its samples.
        backward: whether gradients are computed.
    """

    def __init__(self, run: PipelineRun, parts: ModuleParts, step: TrainingStep, batch: Any, backward: bool) -> None:
        self._run, self._parts, self._step, self._batch, self._backward = run, parts, step, batch, backward

    def repeat(self, whole: bool, attempt: int | None = None) -> RepeatedValues:
        """Run the batch again.

        Args:
            whole: whether it runs as one micro-batch.
            attempt: the number of a repetition with weights that are rounded differently; None for the weights as they
                are.
        """
        run, step, made = self._run, self._step, RepeatedValues()
        draws = SampleDraws(run.device) if whole else None
        if draws is not None:
            seed = next(iter(run.stages.values())).seed
            draws.begin_batch(seed, 0, step.number, step.rows)
        stages = [RepeatedStage(stage, run, step.rows, made, draws) for stage in run.stages.values()]
        data = TrainingBatch(
            move_data_to_device(copy_batch(self._batch), run.device),
            step.rows,
            step.arguments,
            step.divisor,
            samples=step.samples,
            complete=False,
            initial_state=step.initial_state,
            weights=step.weights,
            token_cut=None if whole else step.token_cut,
        )
        steps = run.user_steps
        for listener in run.listeners:
            listener.before_repetition()
        with self._without_trace(attempt):
            steps.begin_batch()
            with steps.around_batch(), forked_rng(run.device):
                item = Item(step.number, step.rows, data, training=self._backward, own_spans=data.own_spans)
                run.engine.run_apart(item, stages, 1 if whole else None)
            made.gradients = self._take_gradients()
        steps.discard_batch()
        made.results = data.results
        if draws is not None:
            made.by_sample = draws.was_used
            names = ", ".join(dict.fromkeys(draws.common))
            made.other_draws = made.other_draws or (names and f"random numbers of {names}, which no sample owns")
        if any(result.loss is None for result in data.results.values()):
            made.failure = "it returns no loss"
        return made

    def _take_gradients(self) -> dict[ValueKey, torch.Tensor]:
        """Remove and return the gradients of this rank, on the CPU and without a further copy there."""
        found = {}
        for layer, name, parameter in self._parts.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                found[ValueKey(Phase.GRADIENT, layer, name)] = gradient.cpu()
                parameter.grad = None
        return found

    @contextmanager
    def _without_trace(self, attempt: int | None) -> Iterator[None]:
        module, parameters = self._run.cut.module, self._run.local_layers.parameters
        kept = keep_unchanged(module, weights=False, moves=self._run.engine.shares_rank)
        with trimmed_heap(), kept, without_hooks(parameters):
            for part in module.modules():  # `keep_unchanged` restores the mode
                if self._step.token_cut is not None or isinstance(part, BatchNorm) or is_spectral_norm(part):
                    part.training = False
            if attempt is None:
                yield
                return
            before = [(p, p.detach().clone()) for p in parameters if not p.is_meta]
            perturb_weights(module, attempt)
            try:
                yield
            finally:
                for parameter, values in before:
                    parameter.data.copy_(values)


def _other_generators() -> Any:
    """Return the states of the generators of Python and NumPy, which draw no numbers of single samples."""
    return comparable_state((random.getstate(), np.random.get_state()))
