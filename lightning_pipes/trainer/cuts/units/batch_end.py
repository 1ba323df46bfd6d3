"""The end of a step that runs once on a whole batch, after its micro-batches have been joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.lazy_step import Crossing
from lightning_pipes.trainer.cuts.units.mode import Function
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices
from lightning_pipes.trainer.cuts.units.trace import Done, Made, TemplateLeaf, Trace, map_leaves
from lightning_pipes.trainer.cuts.units.traced_step import TracedStep
from lightning_pipes.trainer.data.layouts import Layout
from lightning_pipes.trainer.ranks.user_lines import user_line

Layouts = tuple[Layout, ...]
"""The layout of each tensor that a unit returns, that is, the place of the samples in it."""
_MERGED_TYPES = (TemplateLeaf, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class BatchEnd:
    """The place of a step from which it continues with the whole batch.

    Attributes:
        border: the first unit that runs on the whole batch.
        layouts: the layouts of the tensors of each unit before it.
    """

    border: int
    layouts: tuple[Layouts, ...]

    def layout(self, layout: UnitLayout) -> UnitLayout:
        """Return the layout of the micro-batches, with one additional stage for the end of the step."""
        return replace(layout, starts=(*layout.starts, self.border))

    def join(self, crossings: Sequence[Crossing]) -> Crossing:
        """Return the values that cross the border for a whole batch, joined from its micro-batches in order.

        The values are leaves of a new graph.

        Args:
            crossings: the values and the trace of each micro-batch.

        Raises:
            PipelineError: the micro-batches took different paths through the step, or another path than the recorded
                one.
        """
        traces = [trace for _, trace in crossings]
        first, layouts = traces[0], dict[int, Layout]()
        alike = all(t.keys == first.keys and len(t.units) == len(first.units) for t in traces)
        if not alike or len(first.units) > len(self.layouts):
            raise _other_way("reached the end of the stages at another unit")
        columns = zip(*(t.units for t in traces), strict=True)
        units = [_join_units(n, dones, self.layouts[n], layouts) for n, dones in enumerate(columns)]
        if not layouts.keys() >= {*first.keys}:
            raise _other_way("changed a tensor in place that does not depend on weights")
        values = tuple(
            _join_values([each[n] for each, _ in crossings], layouts[key]) for n, key in enumerate(first.keys)
        )
        return values, Trace(units, first.keys, first.shared)

    def split_gradients(self, joined: Crossing, crossings: Sequence[Crossing]) -> list[list[torch.Tensor | None]]:
        """Split the gradients of the joined values into the gradients of each micro-batch.

        Args:
            joined: the values and the trace of the whole batch.
            crossings: the values and the trace of each micro-batch.

        Returns:
            For each micro-batch, the gradients of its values; None for a value without a gradient.
        """
        values, trace = joined
        layouts = {m.key: a for done, of in zip(trace.units, self.layouts, strict=False) for m, a in _made(done, of)}
        found: list[list[torch.Tensor | None]] = [[] for _ in crossings]
        for n, (key, value) in enumerate(zip(trace.keys, values, strict=True)):
            layout, parts = layouts[key], list[torch.Tensor | None]([None] * len(crossings))
            if value.grad is not None and layout.axis is None:
                parts[0] = value.grad
            elif value.grad is not None and layout.axis is not None:
                parts = [*layout.split(value.grad, [each[n].size(layout.axis) for each, _ in crossings])]
            for each, part in zip(found, parts, strict=True):
                each.append(part)
        return found


class DeferredLoss(torch.autograd.Function):
    """A placeholder for the loss of a micro-batch, with value zero.

    Its gradients are filled in after the last micro-batch has arrived, before its backward runs.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor | None], *values: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=values[0].device if values else None)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, *ctx.gradients


class SampleTrace(TracedStep):
    """Runs a step and keeps the tensors that its units make.

    Attributes:
        made: for each unit, its results that are new tensors, and the pure tensors that it has changed in place.
        lines: for each unit, the line of the user's code that calls it.
    """

    def __init__(
        self,
        module: nn.Module,
        atomic: Mapping[str, nn.Module],
        device: torch.device,
        slices: SequentialSlices | None = None,
    ) -> None:
        super().__init__(module, atomic, (), device, slices=slices)
        self.made: list[list[torch.Tensor]] = []
        self.lines: list[str] = []

    def may_draw(self, name: str, path: str | None) -> bool:
        return True

    def run(self, step: Callable[..., Any], batch: Any, arguments: Sequence[Any]) -> SampleTrace:
        """Run a step and return this trace."""
        self.begin(batch)
        with torch.no_grad(), self:
            step(batch, *arguments)
        return self

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        given = [*_tensors(args), *_tensors(kwargs)]
        ran = self.run_here(name, path, function, args, kwargs, given)
        self.units.append(ran.done)
        pairs = zip(_leaves(ran.done.out), _leaves(ran.out), strict=True) if not ran.done.pure else ()
        made = [tensor for leaf, tensor in pairs if isinstance(leaf, Made)]
        self.made.append(made + [self.values.value(key) for _, key in ran.done.written])
        self.lines.append(user_line())
        return ran.out


class UnitAxes(NamedTuple):
    """The places of samples in the tensors that a unit makes.

    Attributes:
        name: the name of the unit.
        line: the line of the user's code that calls the unit.
        layouts: the layout of each tensor in the order of `list_made`, followed by the layouts of the pure tensors that
            the unit changes in place. None for a tensor that depends on samples and has no axis for them.
        joins: whether the results of several micro-batches can be joined to the result of the whole batch.
        is_known: whether micro-batches have the same results except for tensors, so that the next unit is known.
    """

    name: str
    line: str
    layouts: tuple[Layout | None, ...] = ()
    joins: bool = False
    is_known: bool = True


def find_layouts(units: Sequence[UnitAxes]) -> tuple[Layouts, ...]:
    """Return the layouts of the tensors that units return, up to the first unit that mixes samples or may do so."""
    joined = takewhile(lambda unit: unit.joins, units)
    return tuple(tuple(layout for layout in unit.layouts if layout is not None) for unit in joined)


def find_axes(part: SampleTrace, part_rows: int, whole: SampleTrace, rows: int) -> list[UnitAxes]:
    """Return the places of samples in the tensors of all units, up to the first unit with a False `is_known`.

    Args:
        part: the trace of a step with the first `part_rows` samples of `whole`.
        part_rows: the number of samples of `part`.
        whole: the trace of a step with a whole batch.
        rows: the number of samples of `whole`.
    """
    found: list[UnitAxes] = []
    groups: dict[int, int] = {}
    for number, (a, b) in enumerate(zip(part.units, whole.units, strict=False)):
        line = whole.lines[number]
        both = list(zip(_leaves(a.out), _leaves(b.out), strict=False)) if not a.pure else []
        if (a.name, a.pure, a.written) != (b.name, b.pure, b.written) or not all(starmap(_are_equal, both)):
            return [*found, UnitAxes(b.name, line, is_known=False)]
        layouts = [
            _find_axis(*tensors, part_rows, rows, groups)
            for tensors in zip(part.made[number], whole.made[number], strict=False)
        ]
        joins = not a.written and None not in layouts and all(isinstance(one, _MERGED_TYPES) for one, _ in both)
        found.append(UnitAxes(a.name, line, tuple(layouts), joins))
    return found


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two leaves are tensors, or other objects that are equal."""
    try:
        return type(one) is type(other) and (isinstance(one, Made) or bool(one == other))
    except (TypeError, ValueError, RuntimeError):  # an object without a truth value, such as an array
        return False


def _find_axis(
    part: torch.Tensor, whole: torch.Tensor, part_rows: int, rows: int, groups: dict[int, int]
) -> Layout | None:
    if part.ndim != whole.ndim:
        return None
    sizes = [(axis, *pair) for axis, pair in enumerate(zip(part.shape, whole.shape, strict=True)) if len({*pair}) > 1]
    if not sizes and torch.equal(part, whole):
        return Layout(None)
    if len(sizes) == 1 and sizes[0][1] * rows == sizes[0][2] * part_rows:
        return _find_layout(sizes[0][0], part, part_rows, whole, rows, groups)
    return None


def _find_layout(
    axis: int, part: torch.Tensor, part_rows: int, whole: torch.Tensor, rows: int, known: dict[int, int]
) -> Layout:
    """Return the layout of a tensor with an axis of samples.

    The axis may consist of several groups, for example one for each view of a batch.

    Args:
        known: by number of entries per sample, the groups of the last such tensor, for tensors with random numbers.
    """
    entries = whole.size(axis) // rows
    usual = known.get(entries, 1)
    possible = [usual, *(n for n in range(1, entries + 1) if entries % n == 0 and n != usual)]
    for groups in possible if whole.size(axis) == entries * rows else ():
        same = Layout(axis, groups).split(whole, [entries * part_rows, entries * (rows - part_rows)])[0]
        is_exact = not whole.is_floating_point() and not whole.is_complex()
        if torch.equal(same, part) if is_exact else torch.allclose(same, part, rtol=1e-3, atol=1e-6):
            known[entries] = groups
            return Layout(axis, groups)
    return Layout(axis, usual)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


def list_made(done: Done) -> list[Made]:
    """Return the tensors that a unit makes, in order."""
    return [leaf for leaf in _leaves(done.out) if isinstance(leaf, Made)]


def _made(done: Done, layouts: Layouts) -> list[tuple[Made, Layout]]:
    return list(zip(list_made(done), layouts, strict=True))


def _join_units(number: int, dones: Sequence[Done], layouts: Layouts, known: dict[int, Layout]) -> Done:
    """Return a unit of the whole batch, and note the layouts of its values in `known`."""
    first = dones[0]
    if any((d.name, d.pure, d.draws) != (first.name, first.pure, first.draws) or d.written for d in dones):
        raise _other_way(f"called {first.name} as unit {number}")
    if first.pure:
        return first
    columns = list(zip(*(_leaves(d.out) for d in dones), strict=True))
    of_made = iter(layouts)

    def join(column: Sequence[Any]) -> Any:
        one = column[0]
        if not isinstance(one, Made):
            if any(other != one for other in column):
                raise _other_way(f"got {one!r} from {first.name}")
            return one
        known[one.key] = layout = next(of_made, Layout(None))
        axis = layout.axis
        others = [tuple(n for at, n in enumerate(each.shape) if at != axis) for each in column]
        if any(each != others[0] for each in others):
            raise PipelineError(
                f"unit {number} of the step, {first.name}, makes tensors of other sizes for each micro-batch, "
                f"{' and '.join(str(each.shape) for each in column)}, which can't be joined. Pad them to one size, or "
                "set PipelineStrategy(loss='microbatch')"
            )
        if axis is None:
            return one
        rows = sum(each.shape[axis] for each in column)
        return resize(one, (*one.shape[:axis], rows, *one.shape[axis + 1 :]))

    joined = iter([join(column) for column in columns])
    return first._replace(out=map_leaves(first.out, lambda _: next(joined)))


def resize(made: Made, shape: tuple[int, ...]) -> Made:
    """Return the same value with another shape. The order of its axes in memory is kept."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda at: (made.stride[at], -at)):
        strides[axis], step = step, step * max(shape[axis], 1)
    return replace(made, shape=shape, stride=tuple(strides))


def _join_values(parts: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    joined = layout.join([part.detach() for part in parts])
    return joined.requires_grad_(any(part.requires_grad for part in parts))


def _other_way(what: str) -> PipelineError:
    return PipelineError(
        f"A micro-batch {what}, but the other micro-batches or the recorded step did not. Therefore, the micro-batches "
        "can't be joined to the whole batch for its loss. Control flow must not depend on the values of samples. "
        "Otherwise, set PipelineStrategy(loss='microbatch'), which computes a loss for each micro-batch"
    )
