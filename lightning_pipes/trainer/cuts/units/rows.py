"""The values that cross borders if stages or links cut a batch differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_pipes.engine.compute.spans import Unsampled
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.batch_end import UnitAxes, list_made, resize
from lightning_pipes.trainer.cuts.units.lazy_step import Crossing
from lightning_pipes.trainer.cuts.units.trace import Done, Made, Trace, map_leaves
from lightning_pipes.trainer.data.layouts import Layout

_ROWS_WAY_OUT = (
    "Let it have one entry for each sample, compute it in the stage that uses it, name other borders by "
    "PipelineStrategy(partition=[...]), or use a schedule that cuts a batch equally everywhere, such as '1f1b'"
)


class CrossingRows:
    """Sends values with their samples on axis 0, so that the engine can cut them and join them.

    Args:
        units: the places of samples in the tensors of all units of the recorded step.
    """

    def __init__(self, units: Sequence[UnitAxes]) -> None:
        self._units = units
        self._known: tuple[Trace | None, dict[int, tuple[Made | None, Layout | None, UnitAxes]]] = None, {}
        self._resized: tuple[Trace | None, int, Trace] = None, 0, Trace()

    def leave(self, crossing: Crossing, stage: int) -> Any:
        """Return the message of a stage in the form in which it can be cut.

        Args:
            crossing: the values that the step still needs, and its trace.
            stage: the number of the stage.

        Raises:
            PipelineError: a value depends on samples and has no axis for them.
        """
        values, trace = crossing
        known, sent = self._read(trace, stage), dict[int, Any]()
        for key, value in zip(trace.keys, values, strict=True):
            made, layout, unit = known[key]
            if layout is None or not _can_cut(value, layout, made, trace.rows):
                raise PipelineError(
                    f"Stage {stage} sends a tensor of shape {tuple(value.shape)} from {unit.name!r}, which is called "
                    f"at {unit.line}, and other stages or links cut a batch into other micro-batches. The tensor "
                    f"depends on samples, but has no axis for them, so it can't be cut or joined. {_ROWS_WAY_OUT}"
                )
            sent[key] = Unsampled(value) if layout.axis is None else _put_samples_first(value, layout, trace.rows)
        return sent, trace

    def enter(self, message: Any, rows: int, stage: int) -> Crossing:
        """Return the message of the previous stage for a micro-batch of this stage.

        Args:
            message: the message, whose values have been cut and joined.
            rows: the number of samples of the micro-batch.
            stage: the number of the stage that has sent the message.
        """
        sent, trace = message
        if self._resized[:2] != (trace, rows):
            self._resized = trace, rows, self._resize(trace, rows, stage)
        resized, values = self._resized[2], list[torch.Tensor]()
        known = self._read(resized, stage)
        for key in trace.keys:
            made, layout, _ = known[key]
            is_cut = layout is not None and layout.axis is not None
            values.append(_put_samples_back(sent[key], layout, made) if is_cut and layout is not None else sent[key])
        return tuple(values), resized

    def _read(self, trace: Trace, stage: int) -> dict[int, tuple[Made | None, Layout | None, UnitAxes]]:
        """Return how each value of a trace was made, with its layout and its unit.

        Raises:
            PipelineError: the step took another path than the recorded one.
        """
        if self._known[0] is not trace:
            found: dict[int, tuple[Made | None, Layout | None, UnitAxes]] = {}
            for number, done in enumerate(trace.units):
                unit = self._unit(number, done, stage)
                made = list_made(done)
                for one, layout in zip(made, unit.layouts, strict=False):
                    found[one.key] = one, layout, unit
                for (_, key), layout in zip(done.written, unit.layouts[len(made) :], strict=False):
                    found[key] = None, layout, unit
            self._known = trace, found
        return self._known[1]

    def _unit(self, number: int, done: Done, stage: int) -> UnitAxes:
        unit = self._units[min(number, len(self._units) - 1)]
        made = 0 if done.pure else len(list_made(done)) + len(done.written)
        if number < len(self._units) and unit.is_known and (unit.name, len(unit.layouts)) == (done.name, made):
            return unit
        if not unit.is_known:
            why = (
                f"{unit.name!r}, which is called at {unit.line}, has other results for other numbers of samples, and "
                "these results are not only tensors"
            )
        else:
            why = f"its step called {done.name!r} as unit {number}, and the recorded step did not"
        raise PipelineError(
            f"Stage {stage} sends a micro-batch to a stage or link that cuts the batch into other micro-batches, which "
            f"is not possible: {why}. {_ROWS_WAY_OUT}"
        )

    def _resize(self, trace: Trace, rows: int, stage: int) -> Trace:
        """Return the trace for another number of samples."""
        if rows == trace.rows:
            return trace
        known = self._read(trace, stage)

        def change(leaf: Any) -> Any:
            layout = known[leaf.key][1] if isinstance(leaf, Made) else None
            if layout is None or layout.axis is None:
                return leaf
            length = leaf.shape[layout.axis] * rows // trace.rows
            return resize(leaf, (*leaf.shape[: layout.axis], length, *leaf.shape[layout.axis + 1 :]))

        units = [done if done.pure else done._replace(out=map_leaves(done.out, change)) for done in trace.units]
        return Trace(units, trace.keys, trace.shared, rows)


def _can_cut(value: torch.Tensor, layout: Layout, made: Made | None, rows: int) -> bool:
    """Return whether a value without samples, or with a number of entries for each sample, is sent."""
    if layout.axis is None:
        return True
    if made is None:  # the receiver does not know its shape
        return layout.axis == 0 and value.size(0) == rows
    return value.size(layout.axis) % (rows * layout.groups) == 0


def _put_samples_first(value: torch.Tensor, layout: Layout, rows: int) -> torch.Tensor:
    """Return the tensor with its samples on axis 0."""
    axis, groups = layout.axis or 0, layout.groups
    if axis == 0 and value.size(0) == rows:
        return value
    return torch.unflatten(value, axis, (groups, rows, value.size(axis) // (groups * rows))).movedim(axis + 1, 0)


def _put_samples_back(sent: torch.Tensor, layout: Layout, made: Made | None) -> torch.Tensor:
    """Undo `_put_samples_first`, and return the tensor with its samples on their own axis.

    Args:
        sent: the tensor with samples on axis 0.
        layout: its layout.
        made: describes the tensor on the stage that has made it; None for a changed tensor, which is as `sent`.
    """
    axis = layout.axis or 0
    if made is None or sent.ndim == len(made.shape):
        return sent
    value = sent.movedim(0, axis + 1).flatten(axis, axis + 2)
    stride = resize(made, made.shape).stride
    if value.stride() == stride:
        return value
    return torch.empty_strided(made.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
