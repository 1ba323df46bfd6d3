"""Whether what enters the layers, and what each layer does, depends on each sample by itself.

A micro-batch goes through the code before the layers, and through them, without the other samples of its batch. So for
the first batch, and for a few later ones, each rank runs both once more with the whole batch and with its parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.engine.allocator import trimmed_heap
from lightning_pipes.engine.compute.footprint import tensors_in
from lightning_pipes.engine.compute.rng import RngUse, forked_rng, seed_all
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.ir import Kind, PipelineError, Span
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher, is_due
from lightning_pipes.trainer.module.batches import copy_batch, join, take_samples, weighted_sum
from lightning_pipes.trainer.module.capture import named_step
from lightning_pipes.trainer.module.tape import TapedLayer
from lightning_pipes.trainer.module.unchanged import keep_unchanged
from lightning_pipes.trainer.private_lightning import is_compiled, spectral_norms
from lightning_pipes.trainer.step.steps import HOST, why_no_room

_COARSE = 1e-2
"""By how much values may differ, relative to the largest, where they were computed from numbers with half the bits."""


class _LayerOutputs(NamedTuple):
    """The outputs of a layer for a whole batch and for its parts.

    Attributes:
        left: the same of values with a graph that it leaves in attributes, by their names.
        compared: whether they can be compared.
    """

    whole: Any
    parts: dict[Span, Any]
    left: dict[str, tuple[Any, dict[Span, Any]]]
    compared: bool


class SampleCheck(Watcher):
    """Compares a whole batch with its micro-batches, on this rank's stages, and warns once of each place."""

    def __init__(self, run: PipelineRun) -> None:
        self._pipeline, self._cut, self._steps, self._device = run, run.cut, run.user_steps, run.device
        self._rank = run.global_ranks[run.local_layers.holdings.rank]
        self._batches = 0
        self._looks = False
        self._warned: set[str] = set()

    def around_batch(self, step: TrainingStep) -> None:
        """Have the batch kept if it is one that is looked at and is cut."""
        spans = self._pipeline.engine.plan.spans(Kind.F, 0)
        self._looks = False
        if len(spans) < 2 or spans[1].start >= step.rows:
            return
        self._looks = is_due(self._batches)
        if self._looks:
            step.stage_inputs = {}
            step.loaded_copy = move_data_to_device(copy_batch(step.batch), HOST)
        self._batches += 1

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Compare the batch on the stages that have run it. Collective where stages do not step apart."""
        if step.stage_inputs and step.item is not None:
            with trimmed_heap():  # a whole batch fits into no hole that micro-batches have left
                for number, stage in self._pipeline.stages.items():
                    if number in step.stage_inputs:
                        self.compare_samples(stage, step.item)
            if not step.stage_inputs:
                step.loaded_copy = None
        if self._looks and not self._pipeline.is_asynchronous:
            left = self._steps.left  # the last stage merges what layers of other ranks leave, too
            for values in self._pipeline.control.all_gather(left.collect_whole_values()):
                left.add_whole_values(values)

    def compare_samples(self, stage: Stage, item: Item) -> None:
        """Warn if something on this stage depends on several samples; with the weights that the batch has had."""
        data = item.data
        entered = {} if data.stage_inputs is None else data.stage_inputs.get(stage.number, {})
        run = self._pipeline
        own = run.engine.plan.local_spans(Kind.F, stage.number, run.engine.rank)
        rows = sum(span.clip_to(data.rows).rows for span in own)
        if sum(span.rows for span in entered) != rows or stage.offload is not None or item.use is not None:
            return
        del data.stage_inputs[stage.number]
        try:
            self._compare(stage, item, entered)
        except Exception as error:  # code that can't run with a whole batch, or not without gradients
            rank_zero_info(
                f"Stage {stage.number} was not compared for a whole batch and its micro-batches: "
                f"{type(error).__name__}: {error}"
            )

    def _compare(self, stage: Stage, item: Item, entered: dict[Span, Any]) -> None:
        spans = sorted(entered)
        bytes_of_all = sum(t.nbytes for part in entered.values() for t in tensors_in(part))
        if self._device.type == "cpu" and why_no_room(8 * bytes_of_all):
            return
        with torch.no_grad(), forked_rng(self._device), self._steps.step_context():
            if stage.number == 0 and sum(span.rows for span in spans) == item.rows:  # else others have the rest
                self._compare_entering(item, entered)
            parts = {span: move_data_to_device(entered[span], self._device) for span in spans}
            for number, layer in stage.layers.items():
                found = self._outputs(number, layer, parts)
                if found is None:
                    return
                whole, parts, left, compared = found
                name = f"layer {list(self._cut.full._modules)[number]} of self.{self._cut.path} (rank {self._rank})"
                if compared and _differ(whole, parts, totals=True):
                    self._warn(name, f"{name} computes something", "")
                for place, (value, of_parts) in (left if compared else {}).items():
                    if _differ(value, of_parts, totals=True):
                        self._warn(name + place, f"{name} computes .{place}, which it leaves there,", "")

    def _compare_entering(self, item: Item, entered: dict[Span, Any]) -> None:
        step, data = named_step(self._cut.module, "training_step"), item.data
        loaded = move_data_to_device(data.loaded_copy, self._device)

        def capture(batch: Any, rows: int, draws: RngUse) -> Any:
            whole = replace(item, rows=rows)
            return self._steps.capture_input(step, whole, copy_batch(batch), data.arguments, draws)

        with keep_unchanged(self._cut.module, skip=self._cut.proxy):
            draws = RngUse(self._device)
            whole, parts = capture(loaded, data.rows, draws), entered
            mixes = False
            if (
                draws.was_used
            ):  # a whole batch gets other random numbers than its parts; without dropout there may be none
                with _evaluating(self._cut.module, set(self._cut.proxy.modules())):
                    draws = RngUse(self._device)
                    whole = capture(loaded, data.rows, draws)
                    cuts = {s: take_samples(loaded, s, data.rows, samples=data.samples) for s in entered}
                    parts = {span: capture(cuts[span], span.rows, draws) for span in sorted(entered)}
                    if draws.was_used:  # with the same numbers, samples are what they are whatever the others are
                        again = capture(loaded, data.rows, draws)
                        first = min(min(entered).rows, data.rows // 2)
                        others = capture(_with_other_samples(loaded, data.rows, first), data.rows, draws)
                        mixes = not _rows_differ(whole, again, 0) and _rows_differ(whole, others, first)
        on_device = {span: move_data_to_device(part, self._device) for span, part in parts.items()}
        if mixes or (not draws.was_used and _differ(whole, on_device)):
            self._warn(
                "before",
                f"{type(self._cut.module).__name__}.training_step computes what enters self.{self._cut.path}",
                "Compute it in on_after_batch_transfer, or where batches are put together, which get all samples, or s",
            )

    def _outputs(self, number: int, layer: nn.Module, parts: dict[Span, Any]) -> _LayerOutputs | None:
        """Return the outputs of a layer; None if the layer, or its successor, gets no samples."""
        spans = sorted(parts)
        if any(map(is_compiled, layer.modules())):
            return None  # it would be compiled anew, for other sizes
        x = join([parts[span] for span in spans], spans, "what enters a layer", average=True)
        left_trained: set[str] = set()

        def run(samples: Any) -> tuple[Any, dict[str, Any]]:
            self._steps.left.reset_layer(number)  # each micro-batch begins with what the layer kept before the batch
            return self._run(layer, samples, draws)

        with keep_unchanged(layer):
            draws = RngUse(self._device)
            (whole, left), drew = run(x), False
            if draws.was_used:
                with _evaluating(layer):
                    draws = RngUse(self._device)
                    whole, left = run(x)
                    found = {span: run(parts[span]) for span in spans}
                    drew = draws.was_used
            else:
                self._steps.left.note_whole_batch(number)
                found = {span: run(parts[span]) for span in spans}
            if left:  # what has no graph is not trained by
                with torch.enable_grad():
                    _, again = run(parts[spans[0]])
                left_trained = {key for key, value in again.items() if any(t.requires_grad for t in tensors_in(value))}
        # A warning has named them before.
        known = any(isinstance(part, BatchNorm) for part in layer.modules()) or spectral_norms(layer)
        outputs = {span: out for span, (out, _) in found.items()}
        both = {
            place: (left[place], {span: of_part[place] for span, (_, of_part) in found.items()})
            for place in sorted(left_trained)
            if place in left and all(place in of_part for _, of_part in found.values())
        }
        return _LayerOutputs(whole, outputs, both, not known and not drew)

    def _run(self, layer: nn.Module, x: Any, draws: RngUse) -> tuple[Any, dict[str, Any]]:
        """Return the output of a layer, and new values of attributes of its modules, by their names."""
        seed_all(0, self._device)
        before = {place: (value, len(value) if _is_list(value) else 0) for place, value in _attributes(layer).items()}
        draws.start()
        out = layer(pytree.tree_map_only(torch.Tensor, torch.clone, x))
        draws.stop()
        left = {}
        for place, value in _attributes(layer).items():
            old, length = before.get(place, (None, 0))
            left[place] = value if old is not value else value[length:] if _is_list(value) else None
        return out, {place: value for place, value in left.items() if tensors_in(value)}

    def _warn(self, place: str, what: str, way_out: str) -> None:
        if place in self._warned:
            return
        self._warned.add(place)
        warnings.warn(
            f"{what} from several samples together, and gets one micro-batch at a time, so training differs from one "
            f"process. {way_out or 'S'}et PipelineStrategy(microbatches=1). PipelineStrategy(check_loss=False) leaves "
            "this comparison out",
            stacklevel=2,
        )


@contextmanager
def _evaluating(root: nn.Module, but: set[nn.Module] = frozenset()) -> Iterator[None]:  # type: ignore[assignment]
    """Put all modules in `root` in evaluation mode for the block."""
    training = [part for part in root.modules() if part.training and part not in but]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of the modules in a layer, by their names."""
    layer = layer.layer if isinstance(layer, TapedLayer) else layer
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in layer.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_MODULES
    }


_OF_MODULES = frozenset(vars(nn.Module()))


def _with_other_samples(batch: Any, rows: int, first: int) -> Any:
    """Return a copy of a batch with its last samples in place of its `first` ones."""

    def change(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t[rows - first :], t[first:]]) if t.ndim and t.size(0) == rows else t

    return apply_to_collection(batch, torch.Tensor, change)


def _rows_differ(whole: Any, other: Any, start: int) -> bool:
    """Return whether tensors differ in samples from `start` on."""
    pairs = zip(tensors_in(whole), tensors_in(other), strict=False)
    return any(a.shape != b.shape or _values_differ(a[start:], b[start:]) for a, b in pairs if a.ndim)


def _differ(whole: Any, parts: Mapping[Span, Any], totals: bool = False) -> bool:
    """Return whether tensors of a whole batch and of its parts differ by more than rounding.

    Args:
        totals: whether tensors without samples may be means or sums over samples.
    """
    spans = sorted(parts)
    leaves, spec = pytree.tree_flatten(whole)
    of_parts = [pytree.tree_flatten(parts[span]) for span in spans]
    if any(other != spec for _, other in of_parts):
        return False  # what is not a tensor differs, such as a string of each sample
    return any(
        isinstance(leaf, torch.Tensor) and _leaf_differs(leaf, others, spans, totals)
        for leaf, *others in zip(leaves, *(found for found, _ in of_parts), strict=True)
    )


def _leaf_differs(whole: torch.Tensor, parts: Sequence[torch.Tensor], spans: Sequence[Span], totals: bool) -> bool:
    if totals and not all(t.ndim and t.size(0) == span.rows for t, span in zip(parts, spans, strict=True)):
        if any(t.shape != whole.shape for t in parts):
            return True
        rows = sum(span.rows for span in spans)
        means = weighted_sum(parts, [span.rows / rows for span in spans])
        return _values_differ(whole, means.to(whole.dtype)) and _values_differ(
            whole, weighted_sum(parts, [1] * len(parts))
        )
    try:
        joined = join(list(parts), spans, "it")
    except PipelineError:
        return True  # it has no samples, and is another one for each micro-batch
    if joined.shape != whole.shape or joined.dtype != whole.dtype or whole.is_sparse:
        return bool(joined.shape != whole.shape)
    return _values_differ(whole, joined)


def _values_differ(whole: torch.Tensor, joined: torch.Tensor) -> bool:
    if not whole.is_floating_point() and not whole.is_complex():
        return not torch.equal(whole, joined)
    eps = torch.finfo(whole.dtype).eps
    coarse = _COARSE if torch.is_autocast_enabled(whole.device.type) else 0.0
    most = max(coarse, eps ** (2 / 3)) * max(
        1e-30, float(whole.abs().nan_to_num(0.0, 0.0).max() if whole.numel() else 0)
    )
    return bool(((whole - joined).abs() > most).any())
