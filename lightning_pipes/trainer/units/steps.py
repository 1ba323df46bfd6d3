"""The user's steps on the stages of a module that is cut by units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_pipes.engine.compute.rng import BEFORE_LAYERS
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.ir import Plan, Span
from lightning_pipes.trainer.module.capture import Interceptor, named_step
from lightning_pipes.trainer.state.left_values import LeftValues
from lightning_pipes.trainer.state.module_state import ModuleState
from lightning_pipes.trainer.step.logs import recorded
from lightning_pipes.trainer.step.steps import EvaluationBatch, Steps
from lightning_pipes.trainer.units.cut import UnitCut
from lightning_pipes.trainer.units.lazy_step import LazyStep
from lightning_pipes.trainer.units.recording import UnitLayout


class UnitSteps(Steps):
    """Runs the user's steps on every stage; each passes over the units of the others.

    Every unit that draws random numbers has a stream of its own, so these do not depend on the borders.
    """

    runs_whole_evaluation = True

    def __init__(
        self,
        module: pl.LightningModule,
        precision: Precision,
        plan: Plan,
        rank: int,
        seed: int,
        device: torch.device,
        state: ModuleState,
        cut: UnitCut,
        layout: UnitLayout,
    ) -> None:
        interceptor = Interceptor("self")
        left = LeftValues(module, {}, lambda: (), state, cut.scope)
        super().__init__(module, precision, interceptor, plan, rank, seed, device, state, left)
        self._cut = cut
        self._layout = layout
        self._lazy: dict[int, LazyStep] = {}

    def stage_body(self, number: int) -> Body:
        return self._run_stage

    def _run_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        data = item.data
        if isinstance(data, EvaluationBatch):
            return self._evaluate_stage(stage, item, span, received)
        last = stage.number == self._stages - 1
        if last and data.weights is not None:
            data.weights.join_replicas()
        self.state.restore_state()
        with self.step_context():
            stage.seed_user_code(item, span, BEFORE_LAYERS)
            part, step = data.select_samples(span), named_step(self._module, "training_step")
            with recorded(self._module) as logged, self._cut.show_weights():
                out = self._run_lazily(stage, item, span, step, part, received)
        if not last:
            return out
        self.state.note_microbatch(span)
        entered = () if received is None else received[0]
        weights = [p for layer in stage.layers.values() for p in layer.parameters()]
        return self.scaled_loss(item, span, out, logged, [*entered, *weights])

    def _evaluate_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        data = item.data
        assert data.step is not None, "Evaluation has it"
        self.state.restore_state()
        with data.context(), recorded(self._module) as calls, self._cut.show_weights():
            stage.seed_user_code(item, span, BEFORE_LAYERS)
            out = self._run_lazily(stage, item, span, data.step, data.batch, received)
        if stage.number < self._stages - 1:
            return out
        self.state.note_microbatch(span)
        return out, calls

    def _run_lazily(
        self, stage: Stage, item: Item, span: Span, step: Callable[..., Any], batch: Any, received: Any
    ) -> Any:
        if stage.number not in self._lazy:
            self._lazy[stage.number] = LazyStep(self._module, self._layout, stage.number, self._device)
        seed = partial(stage.seed_user_code, item, span)
        return self._lazy[stage.number].run(step, batch, item.data.arguments, received, seed)


def stage_modules(module: nn.Module, layout: UnitLayout) -> list[nn.Module]:
    """Return the modules in units that have weights or buffers: their attributes are those of one stage."""
    owners = {name.rpartition(".")[0] for name in layout.stages_of}
    units = layout.modules(module).items()
    inside = [(f"{path}.{name}".rstrip("."), part) for path, whole in units for name, part in whole.named_modules()]
    return [part for path, part in inside if path in owners]
