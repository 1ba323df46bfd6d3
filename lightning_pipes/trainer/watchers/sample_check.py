"""Check that the inputs of the layers, and the outputs of each layer, depend on each sample separately.

A micro-batch passes through the code before the layers and through the layers without the other samples of its batch.
Therefore, for the first batch and for a few later ones, each rank runs both again with the whole batch and with its
parts, and compares the results.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.engine import trees
from lightning_pipes.engine.allocator import trimmed_heap
from lightning_pipes.engine.compute.rng import RngUse, forked_rng, seed_all
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import Kind, Span
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.cuts.layers.steps import LayerSteps
from lightning_pipes.trainer.cuts.layers.tape import TapedLayer
from lightning_pipes.trainer.cuts.steps import HOST_DEVICE, why_no_room
from lightning_pipes.trainer.data.batches import copy_batch, join, move_batch, per_sample, take_samples, weighted_sum
from lightning_pipes.trainer.data.layouts import (
    Layout,
    TensorComparison,
    compare_tensors,
    guess_layouts,
    join_tensors,
)
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher, is_due
from lightning_pipes.trainer.private_lightning import is_compiled, spectral_norms
from lightning_pipes.trainer.user.unchanged import evaluation_mode, keep_unchanged

_log = logging.getLogger(__name__)

_AUTOCAST_TOLERANCE = 1e-2
"""The tolerated difference between values under autocast, relative to the largest value.

autocast may compute some of the values in half precision.
"""


class _LayerOutputs(NamedTuple):
    """The outputs of a layer for a whole batch and for its parts.

    Attributes:
        whole: the output for the whole batch.
        parts: the outputs for the parts.
        left: the values with a graph that the layer stores in attributes, for the whole batch and for its parts, by the
            names of the attributes.
        compared: whether the outputs can be compared.
    """

    whole: Any
    parts: dict[Span, Any]
    left: dict[str, tuple[Any, dict[Span, Any]]]
    compared: bool


class _Mixing(NamedTuple):
    """A place where a value is computed from several samples.

    Attributes:
        place: identifies the place. Each place is reported once.
        what: the subject and verb of the warning.
        way_out: specific advice, which precedes the advice of all warnings.
    """

    place: str
    what: str
    way_out: str = ""

    def describe(self) -> str:
        """Return the warning."""
        return (
            f"{self.what} from several samples together, and gets one micro-batch at a time, so training differs from "
            f"one process. {self.way_out or 'S'}et PipelineStrategy(microbatches=1). "
            "PipelineStrategy(check_loss=False) leaves this comparison out"
        )


class SampleCheck(Watcher):
    """Compares a whole batch with its micro-batches on this rank's stages.

    It warns once of each place that mixes samples. With schedules that flush, the stages compare in turn. Each stage
    passes the sample axes of its outputs to the next stage, and all warnings appear on global rank 0. If batches
    overlap, each stage compares independently, and tries the layouts that the sizes allow.

    Attributes:
        layouts: by stage, the layouts of the inputs and of the outputs of its layers, as far as they are known.
        compared: the number of the batch to which the layouts belong; -1 before the first comparison.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._pipeline, self._device = run, run.device
        self._cut, self._steps = cast(ContainerCut, run.cut), cast(LayerSteps, run.user_steps)
        self._rank = run.global_ranks[run.local_layers.holdings.rank]
        self._batches = 0
        self._looks = False
        self._noted: set[str] = set()
        """The places that this rank has found."""
        self._warned: set[str] = set()
        """The places of which this rank has warned."""
        self._unsent: list[_Mixing] = []
        """The places of this rank of which global rank 0 has not warned yet."""
        self.layouts: dict[int, tuple[list[Layout] | None, list[Layout] | None]] = {}
        self.compared = -1

    @property
    def has_warned(self) -> bool:
        """Whether global rank 0 has warned of a place."""
        return bool(self._warned)

    def around_batch(self, step: TrainingStep) -> None:
        """Keep a copy of the batch if it is due and has several micro-batches. Collective for batches that are due."""
        spans = self._pipeline.engine.plan.spans(Kind.F, 0)
        self._looks = False
        if len(spans) < 2 or spans[1].start >= step.rows or step.token_cut is not None:
            return  # micro-batches of different lengths are compared by BatchComparison only
        self._looks = is_due(self._batches)
        if self._looks:
            step.stage_inputs = {}
            step.loaded_copy = move_batch(copy_batch(step.batch), HOST_DEVICE)
            if self._batches and self._pipeline.is_asynchronous:
                self._send_warnings()
        self._batches += 1

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Compare the batch on the stages that have run it. Collective unless batches overlap."""
        if self._pipeline.is_asynchronous:
            if step.stage_inputs and step.item is not None:
                with trimmed_heap():  # a whole batch does not fit into the free blocks that micro-batches have left
                    for number, stage in self._pipeline.stages.items():
                        if number in step.stage_inputs:
                            self.compare_samples(stage, step.item)
                if not step.stage_inputs:
                    step.loaded_copy = None
            return
        if self._looks:
            self._compare_in_turn(step)
            step.loaded_copy = None
            self._send_warnings()
            left = self._steps.left  # the last stage also merges the values that layers of other ranks leave
            for values in self._pipeline.control.all_gather(left.collect_whole_values()):
                left.add_whole_values(values)

    def _compare_in_turn(self, step: TrainingStep) -> None:
        """Compare the batch on all stages, one after another. Collective."""
        layouts: list[Layout] | None = None
        self.compared = -1 if step.item is None else step.item.number
        for number in range(self._pipeline.engine.plan.n_stages):
            stage, entering, leaving = self._pipeline.stages.get(number), layouts, None
            if stage is not None and step.item is not None and step.stage_inputs and number in step.stage_inputs:
                with trimmed_heap():
                    entering, leaving = self.compare_samples(stage, step.item, layouts)
            found = self._pipeline.control.all_gather((entering, leaving))
            layouts = next((each for _, each in found if each is not None), None)
            self.layouts[number] = next((each for each, _ in found if each is not None), None), layouts

    def _send_warnings(self) -> None:
        """Warn on global rank 0 of the places that all ranks have found. Collective."""
        for places in self._pipeline.control.all_gather(self._unsent):
            for mixing in places:
                if mixing.place not in self._warned:
                    self._warned.add(mixing.place)
                    rank_zero_warn(mixing.describe())
        self._unsent.clear()

    def compare_samples(
        self, stage: Stage, item: Item, layouts: list[Layout] | None = None
    ) -> tuple[list[Layout] | None, list[Layout] | None]:
        """Find values that depend on several samples on this stage.

        The stage must have the weights with which the batch was computed.

        Args:
            stage: the stage.
            item: the batch in the engine.
            layouts: the layouts of the inputs of the stage; None if they are unknown.

        Returns:
            The layouts of the inputs and of the outputs of the stage; None if they are unknown.
        """
        data = item.data
        entered = {} if data.stage_inputs is None else data.stage_inputs.get(stage.number, {})
        run = self._pipeline
        own = run.engine.plan.local_spans(Kind.F, stage.number, run.engine.rank)
        rows = sum(span.clip_to(data.rows).rows for span in own)
        if sum(span.rows for span in entered) != rows or stage.offload is not None or item.use is not None:
            return None, None
        del data.stage_inputs[stage.number]
        try:
            return self._compare(stage, item, entered, layouts)
        except Exception as error:  # code that can't run with a whole batch or without gradients
            rank_zero_info(
                f"Stage {stage.number} was not compared for a whole batch and its micro-batches: "
                f"{type(error).__name__}: {error}"
            )
            return None, None

    def _compare(
        self, stage: Stage, item: Item, entered: dict[Span, Any], layouts: list[Layout] | None
    ) -> tuple[list[Layout] | None, list[Layout] | None]:
        spans = sorted(entered)
        bytes_of_all = sum(t.nbytes for part in entered.values() for t in tensors_in(part))
        if self._device.type == "cpu" and why_no_room(8 * bytes_of_all):
            return None, None
        with torch.no_grad(), forked_rng(self._device), self._steps.step_context():
            # Otherwise, other ranks have the rest.
            if stage.number == 0 and sum(span.rows for span in spans) == item.rows:
                layouts = self._compare_entering(item, entered)
            parts = {span: move_batch(entered[span], self._device) for span in spans}
            if layouts is not None and len(layouts) == len(tensors_in(parts[spans[0]])):
                tries: list[list[Layout] | None] = [layouts]
            else:
                tries = [*guess_layouts([parts[span] for span in spans], spans)] or [None]
            first: list[_Mixing] | None = None
            failure: Exception | None = None
            for tried in tries:
                try:
                    mixing, leaving = self._compare_layers(stage, parts, tried)
                except Exception as error:
                    failure = failure or error
                    continue
                if not mixing:
                    return tried, leaving
                first = mixing if first is None else first
            if first is None and failure is not None:
                raise failure
            for each in first or ():
                self._note(each)
        return layouts, None

    def _compare_layers(
        self, stage: Stage, parts: dict[Span, Any], layouts: list[Layout] | None
    ) -> tuple[list[_Mixing], list[Layout] | None]:
        """Return the places where layers mix samples, and the layouts of the outputs of the last layer.

        Args:
            stage: the stage.
            parts: the inputs of the stage for each micro-batch.
            layouts: the layouts of these inputs; None if they contain lists with an entry for each sample.
        """
        found: list[_Mixing] = []
        for number, layer in stage.layers.items():
            outputs = self._outputs(number, layer, parts, layouts)
            if outputs is None:
                return found, None
            whole, parts, left, compared = outputs
            name = f"layer {list(self._cut.full._modules)[number]} of self.{self._cut.path} (rank {self._rank})"
            differs, layouts = _differ(whole, parts, totals=True), _leaving_layouts(whole, parts)
            if compared and differs:
                found.append(_Mixing(name, f"{name} computes something"))
            for place, (value, of_parts) in (left if compared else {}).items():
                if _differ(value, of_parts, totals=True):
                    found.append(_Mixing(name + place, f"{name} computes .{place}, which it leaves there,"))
            if layouts is None and not _has_lists(parts):
                _log.debug("%s: its output has no clear axis of samples, and later layers are not compared", name)
                return found, None
        return found, layouts

    def _compare_entering(self, item: Item, entered: dict[Span, Any]) -> list[Layout] | None:
        """Return the layouts of the inputs of the layers, and note if they are computed from several samples."""
        step, data = named_step(self._cut.module, "training_step"), item.data
        loaded = move_batch(data.loaded_copy, self._device)

        def capture(batch: Any, rows: int, draws: RngUse) -> Any:
            whole = replace(item, rows=rows)
            return self._steps.capture_input(step, whole, copy_batch(batch), data.arguments, draws)

        with keep_unchanged(self._cut.module, skip=self._cut.proxy):
            draws = RngUse(self._device)
            whole, parts = capture(loaded, data.rows, draws), entered
            others: Any = None
            # A whole batch draws other random numbers than its parts, but without dropout it may draw none.
            if draws.was_used:
                with evaluation_mode(self._cut.module, skip=self._cut.proxy):
                    draws = RngUse(self._device)
                    whole = capture(loaded, data.rows, draws)
                    cuts = {s: take_samples(loaded, s, data.rows, samples=data.samples) for s in entered}
                    parts = {span: capture(cuts[span], span.rows, draws) for span in sorted(entered)}
                    if draws.was_used:  # with the same random numbers, a sample does not depend on the others
                        again = capture(loaded, data.rows, draws)
                        first = min(min(entered).rows, data.rows // 2)
                        if not _rows_differ(whole, again, 0):
                            others = capture(_with_other_samples(loaded, data.rows, first), data.rows, draws)
        on_device = {span: move_batch(part, self._device) for span, part in parts.items()}
        layouts = _leaving_layouts(whole, on_device)
        if draws.was_used:
            mixes = others is not None and _samples_differ(whole, others, on_device, first, data.rows)
        else:
            mixes = _differ(whole, on_device)
        if mixes:
            self._note(
                _Mixing(
                    "before",
                    f"{type(self._cut.module).__name__}.training_step computes what enters self.{self._cut.path}",
                    "Compute it in on_after_batch_transfer, or where batches are put together, which get all samples, "
                    "or s",
                )
            )
        return layouts

    def _outputs(
        self, number: int, layer: nn.Module, parts: dict[Span, Any], layouts: Sequence[Layout] | None = None
    ) -> _LayerOutputs | None:
        """Return the outputs of a layer; None if a module in it is compiled.

        Args:
            number: the number of the layer.
            layer: the layer.
            parts: the inputs of the layer for each micro-batch.
            layouts: the layouts of the tensors in each part; None if their samples are on axis 0 or in lists.
        """
        spans = sorted(parts)
        if any(map(is_compiled, layer.modules())):
            return None  # it would be compiled again, for other sizes
        entering = [parts[span] for span in spans]
        if layouts is None:
            x = join(entering, spans, "what enters a layer", average=True)
        else:
            x = join_tensors(entering, spans, layouts)
        left_trained: set[str] = set()

        def run(samples: Any) -> tuple[Any, dict[str, Any]]:
            # Each micro-batch starts with the values that the layer had before the batch.
            self._steps.left.reset_layer(number)
            return self._run(layer, samples, draws)

        with keep_unchanged(layer):
            draws = RngUse(self._device)
            (whole, left), drew = run(x), False
            if draws.was_used:
                with evaluation_mode(layer):
                    draws = RngUse(self._device)
                    whole, left = run(x)
                    found = {span: run(parts[span]) for span in spans}
                    drew = draws.was_used
            else:
                self._steps.left.note_whole_batch(number)
                found = {span: run(parts[span]) for span in spans}
            if left:  # values without a graph do not contribute to gradients
                with torch.enable_grad():
                    _, again = run(parts[spans[0]])
                left_trained = {key for key, value in again.items() if any(t.requires_grad for t in tensors_in(value))}
        # An earlier warning has named these layers.
        known = any(isinstance(part, BatchNorm) for part in layer.modules()) or spectral_norms(layer)
        outputs = {span: out for span, (out, _) in found.items()}
        both = {
            place: (left[place], {span: of_part[place] for span, (_, of_part) in found.items()})
            for place in sorted(left_trained)
            if place in left and all(place in of_part for _, of_part in found.values())
        }
        return _LayerOutputs(whole, outputs, both, not known and not drew)

    def _run(self, layer: nn.Module, x: Any, draws: RngUse) -> tuple[Any, dict[str, Any]]:
        """Return the output of a layer, and the new values of attributes of its modules by their names."""
        seed_all(0, self._device)
        before = {place: (value, len(value) if _is_list(value) else 0) for place, value in _attributes(layer).items()}
        draws.start()
        out = layer(trees.map_tensors(torch.clone, x))
        draws.stop()
        left = {}
        for place, value in _attributes(layer).items():
            old, length = before.get(place, (None, 0))
            left[place] = value if old is not value else value[length:] if _is_list(value) else None
        return out, {place: value for place, value in left.items() if tensors_in(value)}

    def _note(self, mixing: _Mixing) -> None:
        """Record a place for the warnings of global rank 0.

        If batches overlap, also warn of it on this rank immediately.
        """
        if mixing.place in self._noted:
            return
        self._noted.add(mixing.place)
        self._unsent.append(mixing)
        if self._pipeline.is_asynchronous:
            self._warned.add(mixing.place)
            warnings.warn(mixing.describe(), stacklevel=2)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of the modules in a layer, by their names."""
    layer = layer.layer if isinstance(layer, TapedLayer) else layer
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in layer.named_modules()
        for key, value in vars(part).items()
        if key not in _MODULE_ATTRIBUTES
    }


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _with_other_samples(batch: Any, rows: int, first: int) -> Any:
    """Return a copy of a batch in which its last samples replace its `first` ones."""

    def change(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t[rows - first :], t[first:]]) if t.ndim and t.size(0) == rows else t

    return apply_to_collection(batch, torch.Tensor, change)


def _rows_differ(whole: Any, other: Any, start: int) -> bool:
    """Return whether tensors differ in entries of axis 0 from `start` on."""
    pairs = zip(tensors_in(whole), tensors_in(other), strict=False)
    return any(a.shape != b.shape or _values_differ(a[start:], b[start:]) for a, b in pairs if a.ndim)


def _samples_differ(whole: Any, other: Any, parts: Mapping[Span, Any], first: int, rows: int) -> bool:
    """Return whether the samples from `first` on change if other samples precede them in the whole batch."""
    spans = sorted(parts)
    found = compare_tensors(whole, [parts[span] for span in spans], spans, _values_differ)
    changed = tensors_in(other)
    if found is None or len(found) != len(changed):
        return False

    def differ(a: torch.Tensor, b: torch.Tensor, layout: Layout) -> bool:
        kept, new = layout.select_from(a, first, rows), layout.select_from(b, first, rows)
        return kept is not None and new is not None and _values_differ(kept, new)

    return any(
        each.layouts != [] and each.whole.shape == b.shape and all(differ(each.whole, b, way) for way in each.layouts)
        for each, b in zip(found, changed, strict=True)
    )


def _differ(whole: Any, parts: Mapping[Span, Any], totals: bool = False) -> bool:
    """Return whether tensors of a whole batch and of its parts differ by more than rounding, on any of their axes.

    Args:
        whole: the tensors of the whole batch.
        parts: the tensors of its parts.
        totals: whether tensors without samples may be means or sums over samples.
    """
    spans = sorted(parts)
    found = compare_tensors(whole, [parts[span] for span in spans], spans, _values_differ)
    if found is None:
        return False  # a value that is not a tensor differs, such as a string of each sample
    wrong = (each for each in found if each.is_different and each.is_decidable)
    return any(not (totals and _is_total(each, spans)) for each in wrong)


def _is_total(compared: TensorComparison, spans: Sequence[Span]) -> bool:
    """Return whether a tensor is the mean or the sum of the tensors of the micro-batches."""
    whole, parts = compared.whole, compared.parts
    if any(part.shape != whole.shape for part in parts):
        return False
    rows = sum(span.rows for span in spans)
    means = weighted_sum(parts, [span.rows / rows for span in spans])
    total = weighted_sum(parts, [1] * len(parts))
    return not _values_differ(whole, means.to(whole.dtype)) or not _values_differ(whole, total)


def _leaving_layouts(whole: Any, parts: Mapping[Span, Any]) -> list[Layout] | None:
    """Return the layouts of the tensors that leave a layer; None if one of them can't be determined."""
    spans = sorted(parts)
    found = compare_tensors(whole, [parts[span] for span in spans], spans, _values_differ)
    if found is None or any(not each.layouts for each in found):
        return None
    return [each.layouts[0] for each in found]


def _has_lists(parts: Mapping[Span, Any]) -> bool:
    """Return whether micro-batches contain lists with an entry for each sample."""
    return len({pytree.tree_structure(part) for part in parts.values()}) > 1 or any(
        per_sample(leaf, span.rows)
        for span, part in parts.items()
        for leaf in pytree.tree_leaves(part, is_leaf=lambda each: isinstance(each, list))
    )


def _values_differ(whole: torch.Tensor, joined: torch.Tensor) -> bool:
    if not whole.is_floating_point() and not whole.is_complex():
        return not torch.equal(whole, joined)
    eps = torch.finfo(whole.dtype).eps
    coarse = _AUTOCAST_TOLERANCE if torch.is_autocast_enabled(whole.device.type) else 0.0
    most = max(coarse, eps ** (2 / 3)) * max(
        1e-30, float(whole.abs().nan_to_num(0.0, 0.0).max() if whole.numel() else 0)
    )
    return bool(((whole - joined).abs() > most).any())
