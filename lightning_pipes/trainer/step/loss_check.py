"""Whether a batch's loss is the mean of its micro-batches' losses, as training in a pipeline takes it to be.

Else the gradients are those of another loss than on one process. So in the first batch of a run the last stage keeps
what leaves the layers, runs the step around them once more with the whole batch, and compares the two losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_pipes.engine.compute.footprint import tensors_in
from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.rng import Draws, comparable
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import Span
from lightning_pipes.trainer.module.batches import copied, join, take
from lightning_pipes.trainer.module.generators import state_of
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.module.unchanged import generators, unchanged
from lightning_pipes.trainer.step.kept import HOST, Kept, no_room
from lightning_pipes.trainer.step.logs import recorded
from lightning_pipes.trainer.step.steps import Steps, TrainingBatch, loss_of

_HALF = 1e-4
"""By how much losses may differ, relatively, where they are computed from numbers with half the bits: batches of other
sizes made 2e-6 of it."""


class _NotComparableError(Exception):
    """Why the two losses say nothing."""


class _Losses(NamedTuple):
    """Of the whole batch and of its parts; their type, and those of what they were computed from."""

    whole: float
    parts: dict[Span, float]
    kind: torch.dtype
    types: set[torch.dtype]


class LossCheck:
    """Compares the losses in the first batch of a run that is cut, on the rank of the last stage, and warns once.

    Args:
        needed: bytes that the last stage takes for one sample, or None while that is not known.
    """

    def __init__(self, cut: CutModule, steps: Steps, device: torch.device, needed: Callable[[], float | None]) -> None:
        self._cut = cut
        self._module = cut.module
        self._steps = steps
        self._device = device
        self._needed = needed
        self._waits = True

    def begin(self, data: TrainingBatch, spans: Iterable[Span]) -> None:
        """Has the batch kept if it is the first that is cut into several of `spans`."""
        if self._waits and sum(span.start < data.rows for span in spans) > 1:
            self._waits = False
            data.kept = Kept(move_data_to_device(copied(data.batch), HOST), data.rows)

    def compare(self, stage: Stage, item: Item) -> None:
        """Warns if the loss of the whole batch is another one; `stage` is the last one, with the weights by which the
        batch was computed."""
        data = item.data
        kept, data.kept = data.kept, None
        if kept is None:
            return
        try:
            whole, parts, kind, types = self._losses(stage, item, kept)
        except Exception as error:  # a step that can't run on a whole batch, or not without gradients
            reason = str(error) if isinstance(error, _NotComparableError) else f"{type(error).__name__}: {error}"
            rank_zero_info(f"The loss of the first batch was not compared with those of its micro-batches: {reason}")
            return
        mean = sum(loss * (span.rows / kept.rows) for span, loss in parts.items())
        if _differ(whole, mean, [whole, *parts.values()], kind, types):
            rank_zero_warn(
                f"{type(self._module).__name__}.training_step returns a loss that is no mean over samples: it is "
                f"{whole:.6g} for the first batch as a whole, and {mean:.6g} as the mean of its {len(parts)} "
                "micro-batches, so training differs from one process. Set PipelineStrategy(microbatches=1), or let the "
                "loss be a mean over the samples of what each one has by itself: a mean over tokens that are not "
                "padded, a sum, and a comparison of samples with each other are none. "
                "PipelineStrategy(check_loss=False) leaves this comparison out"
            )

    def _losses(self, stage: Stage, item: Item, kept: Kept) -> _Losses:
        parts = {span: result.loss.item() for span, result in item.data.results.items()}
        if kept.left_out:
            raise _NotComparableError(kept.left_out)
        if kept.parts.keys() != parts.keys():
            raise _NotComparableError("not all micro-batches have run")
        needed = self._needed()
        crowded = no_room(int(needed * kept.rows)) if needed is not None and self._device.type == "cpu" else ""
        if crowded:
            raise _NotComparableError(crowded)
        with unchanged(self._module, skip=None if kept.inside else self._cut.proxy), recorded(self._module):
            arguments = item.data.arguments
            order = sorted(kept.parts)
            x = join([kept.parts[span] for span in order], order, "what the last stage has")

            def loss(batch: Any, x: Any, rows: int) -> tuple[torch.Tensor, bool]:
                return self._loss(stage, replace(item, rows=rows, training=False), batch, x, arguments, kept.inside)

            if not kept.inside:
                whole, drew = loss(copied(kept.batch), x, kept.rows)
                if not drew:
                    return _Losses(whole.item(), parts, whole.dtype, self._types(whole, x))
            # Random numbers of a whole batch are others than those of its parts. Without dropout there may be none.
            with self._evaluating(kept.inside):
                whole, drew = loss(copied(kept.batch), x, kept.rows)
                for span in order:
                    batch = copied(take(kept.batch, span, kept.rows, samples=item.data.samples))
                    part, drew_too = loss(batch, kept.parts[span], span.rows)
                    parts[span], drew = part.item(), drew or drew_too
            if drew:
                raise _NotComparableError(
                    "training_step draws random numbers around the layers, which for a whole batch are others"
                )
            return _Losses(whole.item(), parts, whole.dtype, self._types(whole, x))

    def _loss(
        self, stage: Stage, item: Item, batch: Any, x: Any, arguments: tuple[Any, ...], inside: bool
    ) -> tuple[torch.Tensor, bool]:
        """The loss of those samples, and whether random numbers were drawn for it outside of the layers."""
        x, batch = move_data_to_device((copied(x), batch), self._device)
        step = self._module.training_step

        def layers() -> Any:
            return stage.run_layers(item, Span(0, item.rows), x) if inside else x

        own = generators(self._module)
        before = _states(own)
        with torch.no_grad(), self._steps.context():
            draws = Draws(self._device)
            out = self._steps.around(step, item, batch, arguments, layers, draws)
            return loss_of(out)[0].detach(), draws.seen or _states(own) != before

    @contextmanager
    def _evaluating(self, inside: bool) -> Iterator[None]:
        """In the block all modules that are run are in evaluation mode; `unchanged` ends it."""
        layers: set[nn.Module] = set() if inside else set(self._cut.proxy.modules())
        for part in self._module.modules():
            if part not in layers:
                part.training = False
        yield

    def _types(self, loss: torch.Tensor, x: Any) -> set[torch.dtype]:
        with self._steps.context():
            kind = self._device.type
            cast = {torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set()
        return {loss.dtype, *(t.dtype for t in tensors_in(x) if t.is_floating_point()), *cast}


def _states(own: Iterable[Any]) -> list[Any]:
    return [comparable(state_of(generator)) for generator in own]


def _differ(whole: float, mean: float, losses: Iterable[float], kind: torch.dtype, types: set[torch.dtype]) -> bool:
    """Whether the two differ by more than rounding makes of losses of that size and `kind`; `types` are those of what
    they were computed from."""
    if not math.isfinite(whole) or not math.isfinite(mean):
        return math.isfinite(whole) or math.isfinite(mean)
    coarsest, own = (max(torch.finfo(dtype).eps for dtype in of) for of in (types, {kind}))
    relative = max(_HALF if coarsest > _HALF else 0.0, own if own > _HALF else own ** (2 / 3))
    return abs(whole - mean) > relative * max(abs(loss) for loss in losses if math.isfinite(loss))
