"""The costs of one layer as tables by number of rows, and the bytes that ranks hold."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Real
from typing import Any, Protocol

from lightning_pipes.cost.links import MAX_SECONDS
from lightning_pipes.ir import InputError, Instruction, Kind, Plan, check_fields, check_number, layer_passes, short_repr

Table = tuple[tuple[int, float], ...]
"""Pairs of (rows, seconds) or (rows, bytes), with rows in ascending order."""


def at_rows(table: Table, rows: int) -> float:
    """Return the value of a table at `rows`.

    The value is interpolated linearly, and extrapolated linearly beyond both ends of the table. It is never negative.
    The value of a table with a single entry is constant, and the value of an empty table is 0.
    """
    if not table:
        return 0.0
    if len(table) == 1:
        return table[0][1]
    right = min(max(bisect_left(table, (rows, -1.0)), 1), len(table) - 1)
    (x0, y0), (x1, y1) = table[right - 1], table[right]
    if rows == x1:
        return y1  # exact, without rounding errors from the interpolation
    return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


def to_nanoseconds(seconds: float) -> int:
    """Return a duration rounded to whole nanoseconds.

    Raises:
        InputError: if the duration is too long to simulate.
    """
    if not seconds < MAX_SECONDS:
        raise InputError(f"{seconds:g} s is too long to simulate; check the units, and look for a slow link")
    return round(seconds * 1e9)


def check_table(what: str, table: Table) -> None:
    """Check that the rows of a table ascend and that its times are finite and not negative.

    Args:
        what: the name of the table, used in the error message.
        table: the table to check.

    Raises:
        InputError: if they do not.
    """
    rows = [r for r, _ in table]
    if not table or rows != sorted(set(rows)) or not all(0 <= t < math.inf for _, t in table):
        raise InputError(
            f"seconds of {what} need ascending rows and times that are finite and not negative, got {short_repr(table)}"
        )


def check_tables(seconds: object) -> None:
    """Check that `seconds` maps pairs of kind and stage to tables.

    Raises:
        InputError: if a key or a value has another form. The message shows the correct form.
    """
    if not isinstance(seconds, Mapping):
        return
    for key, table in seconds.items():
        if not (isinstance(key, tuple) and len(key) == 2):
            raise InputError(
                f"seconds are listed by kind and stage, as in {{(Kind.F, 0): ((1, 0.01),)}}; got the key "
                f"{short_repr(key)}"
            )
        if isinstance(table, Real):
            raise InputError(
                f"seconds of {key[0]}{key[1]} must be a table of pairs (rows, seconds), got {short_repr(table)}. If "
                "the time does not depend on the number of rows, "
                f"write (({0 if key[0] == Kind.STEP else 1}, {short_repr(table)}),)"
            )


_DURATION_NAMES = ("forward", "backward", "input_backward", "weight_backward")


@dataclass(frozen=True)
class LayerProfile:
    """The seconds and bytes of one layer. Tables have the form ((rows, value), ...), with rows in ascending order.

    Attributes:
        name: the name of the layer.
        forward: the seconds of the forward.
        backward: the seconds of the full backward.
        input_backward: the seconds of the backward for input gradients only (I). It is empty if this was not measured.
        weight_backward: the seconds of the backward for weight gradients only (W). It is empty if this was not
            measured.
        step: the seconds of the layer's share of the optimizer step.
        weight_bytes: the bytes of the parameters and buffers.
        gradient_bytes: the bytes of the gradients of the parameters.
        optimizer_bytes: the bytes of the optimizer state.
        saved: the bytes that the layer keeps from forward to backward, without weights and without tensors of earlier
            layers.
        keeps_input: whether the layer also keeps its input. If an earlier layer is on the same stage, that layer counts
            these bytes.
        output: the bytes of the output, which are also the bytes of the gradient of the output.
        working: the temporary bytes while the layer runs, as the maximum over forward and backward.

    Raises:
        InputError: if a number is negative or infinite, or if the rows of a table do not ascend.
    """

    name: str
    forward: Table
    backward: Table
    input_backward: Table = ()
    weight_backward: Table = ()
    step: float = 0.0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved: Table = ()
    keeps_input: bool = False
    output: Table = ()
    working: Table = ()

    def __post_init__(self) -> None:
        check_fields(self)
        where = f"layer {self.name!r}"
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                rows = [r for r, _ in value]
                if (
                    rows != sorted(set(rows))
                    or min(rows, default=0) < 0
                    or not all(0 <= x < math.inf for _, x in value)
                ):
                    raise InputError(
                        f"{where}: {name} needs ascending rows and finite numbers, none negative, got "
                        f"{short_repr(value)}"
                    )
            elif not isinstance(value, str | bool):
                check_number(f"{where}: {name}", value, "finite and not negative", lambda x: 0 <= x < math.inf)

    def seconds_of(self, kind: Kind) -> Table:
        """Return the table of the seconds of F, B, I or W.

        For a layer without gradients of weights, I takes the time of the full backward, and W takes no time.

        Raises:
            InputError: if the kind is I or W, and the profile has no times for it.
        """
        if kind is Kind.F:
            return self.forward
        if kind is Kind.B:
            return self.backward
        if not self.gradient_bytes:
            return self.backward if kind is Kind.I else ((1, 0.0),)
        table = self.input_backward if kind is Kind.I else self.weight_backward
        if not table:
            raise InputError(
                f"the profile of layer {self.name!r} has no times of {kind}; measure them with split=True, "
                "or choose a schedule with full backwards"
            )
        return table

    def scaled(self, factor: float) -> LayerProfile:
        """Return this layer with all forward and backward times multiplied by `factor`."""
        times: dict[str, Any] = {
            name: tuple((rows, value * factor) for rows, value in getattr(self, name)) for name in _DURATION_NAMES
        }
        return replace(self, **times)

    @staticmethod
    def mean_of(parts: Sequence[LayerProfile]) -> LayerProfile:
        """Return the first of several profiles of the same layer, with the mean seconds of all profiles."""
        means: dict[str, Any] = {name: _mean_table([getattr(p, name) for p in parts]) for name in _DURATION_NAMES}
        return replace(parts[0], step=sum(p.step for p in parts) / len(parts), **means)


def sum_tables(tables: Iterable[Table]) -> Table:
    """Return the sum of tables, with one entry for each number of rows that occurs in any of them."""
    given = [table for table in tables if table]
    rows = sorted(set(chain.from_iterable((r for r, _ in table) for table in given)))
    return tuple((r, sum(at_rows(table, r) for table in given)) for r in rows) or ((1, 0.0),)


def per_row(table: Table) -> float:
    """Return the bytes per row, computed from the entry of the table with the most rows."""
    return table[-1][1] / max(table[-1][0], 1) if table else 0.0


def _mean_table(tables: Sequence[Table]) -> Table:
    """Return the mean of the tables that are not empty. These must have the same rows."""
    given = [table for table in tables if table]
    return tuple((at[0][0], sum(value for _, value in at) / len(at)) for at in zip(*given, strict=True))


class StageByteCosts(Protocol):
    """The bytes of stages and messages. `CostModel` documents each property."""

    @property
    def forward_bytes(self) -> tuple[float, ...]: ...

    @property
    def backward_bytes(self) -> tuple[float, ...]: ...

    @property
    def activation_bytes(self) -> tuple[int, ...]: ...

    @property
    def weight_bytes(self) -> tuple[int, ...]: ...

    @property
    def state_bytes(self) -> tuple[int, ...]: ...

    @property
    def working_bytes(self) -> tuple[float, ...]: ...

    @property
    def waiting_messages(self) -> int: ...


def held_bytes(of: StageByteCosts, i: Instruction, plan: Plan) -> tuple[int, int]:
    """Return the bytes of activations that `i` allocates when it starts and frees when it ends.

    A forward with several passes allocates the peak of all passes. All activations that a backward needs and that the
    stage recomputes are allocated when the recomputation starts, which is a part of the backward or an instruction of
    its own.

    Args:
        of: the bytes of the stages.
        i: the computation.
        plan: the plan of the computation.

    Returns:
        The bytes allocated at the start and the bytes freed at the end.
    """
    if i.kind is Kind.STEP or not (of.activation_bytes or of.working_bytes):
        return 0, 0
    s = i.stage
    all_of_it = of.activation_bytes[s] if of.activation_bytes else 0
    received = int(of.forward_bytes[s - 1]) if s > 0 and of.forward_bytes else 0
    kept = made_again = most = working = 0
    for rows, again in layer_passes(i, plan):
        at_work = int(of.working_bytes[s] * rows) if of.working_bytes else 0
        working = max(working, at_work)
        kept += (received if again else all_of_it) * rows
        made_again += all_of_it * rows if again else 0
        most = max(most, kept + at_work)
    match i.kind:
        case Kind.F:
            return most, most - kept
        case Kind.R:
            return made_again + working, working
        case Kind.I | Kind.B:
            taken = working if plan.early_recompute else made_again + working
            return taken, working if i.kind is Kind.I else kept + made_again + working
        case _:
            return working, kept + made_again + working


def resident_bytes(of: StageByteCosts, rank: int, plan: Plan) -> int:
    """Return the bytes that `rank` holds all the time.

    They include the weights in every version that the plan allows, gradients, optimizer states, and messages that wait
    at their receiver.
    """
    stages = plan.stages[rank]
    weights = sum(of.weight_bytes[s] * plan.versions[s] for s in stages) if of.weight_bytes else 0
    states = sum(of.state_bytes[s] for s in stages) if of.state_bytes else 0
    return len(plan.jobs) * (weights + states + _waiting_bytes(of, stages, plan))


def _waiting_bytes(of: StageByteCosts, stages: Sequence[int], plan: Plan) -> int:
    if not of.waiting_messages:
        return 0
    size = 0.0
    for s in stages:
        if s and plan.is_remote_edge(s - 1) and of.forward_bytes:
            size += of.forward_bytes[s - 1] * max(span.rows for span in plan.spans(Kind.RF, s))
        if s + 1 < plan.n_stages and plan.is_remote_edge(s) and of.backward_bytes:
            size += of.backward_bytes[s] * max(span.rows for span in plan.spans(Kind.RB, s))
    return int(of.waiting_messages * size)
