"""Profiles of models: the costs of each layer, measured on a device or computed from shapes.

The costs of a stage are the sums of the costs of its layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost.layer import LayerProfile, Table, at_rows, per_row
from lightning_pipes.cost.model import CostModel
from lightning_pipes.ir import MAX_STAGES, InputError, Kind, Span, check_fields, check_number, short_repr
from lightning_pipes.ir.checks import check_json_fields, field_types, read_object

PROFILE_FORMAT = 1
"""The version of the file format. It is increased when a reader of an older version would misread the file."""
MAX_LAYERS = MAX_STAGES
"""The maximum number of layers. A plan can't have more stages than this, so more layers would have no use."""
MIN_ROWS_NOTE = "least_rows"
"""The key of a profile's notes for the smallest number of samples on which the model ran, if fewer samples failed."""
LENGTH_COST_NOTE = "length_cost"
"""The key of a profile's notes for the numbers of a `LengthCost`, if the times of sequences by length were measured."""
_EMPTY_BEFORE, _EMPTY_AFTER = (LayerProfile(name, ((1, 0.0),), ((1, 0.0),)) for name in ("before", "after"))


@dataclass(frozen=True)
class ModelProfile:
    """The costs of the layers of a model, in order.

    Attributes:
        layers: the costs of each layer.
        before: the code that the first stage runs before the layers. Its output is the input of the first layer.
        after: the code that the last stage runs after the layers, such as the loss.
        overhead: the seconds that a rank spends before each computation.
        joining: the seconds per byte of samples that are concatenated from parts; see `CostModel`.
        widened: the bytes of gradients in messages between replicas, as a multiple of their bytes in memory. It is 2
            for half precision, because the engine sums gradients in float32.
        device: the name of the measured device, for display.
        source: the origin of the numbers: "measured", or the formula.
        notes: further information about the profile, such as `MIN_ROWS_NOTE`.

    Raises:
        InputError: if there are no layers or more than `MAX_LAYERS`, or if a number is out of range.
    """

    layers: tuple[LayerProfile, ...]
    before: LayerProfile = _EMPTY_BEFORE
    after: LayerProfile = _EMPTY_AFTER
    overhead: float = 0.0
    joining: float = 0.0
    widened: float = 1.0
    device: str = ""
    source: str = "measured"
    notes: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise InputError(f"a profile has 1 to {MAX_LAYERS} layers, got {len(self.layers)}")
        for name in ("overhead", "joining"):
            check_number(name, getattr(self, name), "finite seconds, not negative", lambda x: 0 <= x < math.inf)
        check_number("widened", self.widened, "finite and above 0", lambda x: 0 < x < math.inf)

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields, without cached arrays.

        Hosts without a shared secret do not accept pickled arrays, so each process computes its own.
        """
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def has_split(self) -> bool:
        """Whether both parts of the backward were measured for every layer with weights."""
        parts = (self.before, *self.layers, self.after)
        return all(part.input_backward and part.weight_backward for part in parts if part.gradient_bytes)

    @property
    def least_rows(self) -> int:
        """The smallest number of samples in a micro-batch with which the model is known to run."""
        return int(self.notes.get(MIN_ROWS_NOTE, 1))

    def seconds(self, kind: Kind, layer: int, rows: int) -> float:
        """Return the seconds of one computation of a layer. `rows` has no effect on a STEP.

        Raises:
            InputError: if the kind is I or W, and it was not measured.
        """
        found = self.layers[layer]
        if kind is Kind.STEP:
            return found.step
        return at_rows(found.seconds_of(kind), rows)

    @cached_property
    def layer_arrays(self) -> LayerArrays:
        """The seconds and bytes of all layers as arrays."""
        parts = (self.before, *self.layers, self.after)
        return LayerArrays(
            {kind: [part.seconds_of(kind) for part in parts] for kind in self.timed_kinds},
            {
                "step": [part.step for part in parts],
                "weights": [part.weight_bytes for part in parts],
                "gradients": [part.gradient_bytes for part in parts],
                "averaged": [part.gradient_bytes * self.widened for part in parts],
                "optimizer": [part.optimizer_bytes for part in parts],
                "saved": [per_row(part.saved) for part in parts],
                "working": [per_row(part.working) for part in parts],
            },
        )

    @cached_property
    def timed_kinds(self) -> tuple[Kind, ...]:
        """The kinds of computations with rows that have measured seconds."""
        return (Kind.F, Kind.B, Kind.I, Kind.W) if self.has_split else (Kind.F, Kind.B)

    def stage_costs(self, layers: Sequence[Span], speeds: Sequence[float] = ()) -> CostModel:
        """Return the cost model of stages that consist of the given layers.

        Messages take no time, because the result has no links.

        Args:
            layers: the layers of each stage.
            speeds: the speed of each stage's device, by which its times are divided. By default, the times are
                unchanged.
        """
        columns = self.layer_arrays
        seconds = {
            (kind, stage): table
            for kind in self.timed_kinds
            for stage, table in enumerate(columns.stage_tables(kind, layers, speeds))
        }
        for stage, step in enumerate(columns.stage_sums("step", layers)):
            seconds[Kind.STEP, stage] = ((0, step / (speeds[stage] if speeds else 1.0)),)
        edges = tuple(self.edge_bytes(span.stop) for span in layers[:-1])
        states = zip(columns.stage_sums("gradients", layers), columns.stage_sums("optimizer", layers), strict=True)
        return CostModel(
            seconds,
            forward_bytes=edges,
            backward_bytes=edges,
            activation_bytes=tuple(self.activation_bytes(layers, n) for n in range(len(layers))),
            weight_bytes=tuple(map(int, columns.stage_sums("weights", layers))),
            state_bytes=tuple(int(gradients + optimizer) for gradients, optimizer in states),
            working_bytes=tuple(columns.stage_maxima("working", layers)),
            overhead=self.overhead,
            joining=self.joining,
        )

    def edge_bytes(self, cut: int) -> float:
        """Return the bytes per row that are sent between layer `cut - 1` and layer `cut`."""
        return per_row(self.layers[cut - 1].output if cut else self.before.output)

    def activation_bytes(self, layers: Sequence[Span], stage: int) -> int:
        """Return the bytes per row that a stage keeps from F to B.

        They include the input of the stage if its first layer keeps it.

        Args:
            layers: the layers of each stage.
            stage: the number of the stage.
        """
        span = layers[stage]
        kept = sum(per_row(layer.saved) for layer in self.layers[span.start : span.stop])
        if stage == 0:
            kept += per_row(self.before.saved)
        elif span.rows and self.layers[span.start].keeps_input:
            kept += self.edge_bytes(span.start)
        if stage == len(layers) - 1:
            kept += per_row(self.after.saved)
        return round(kept)

    def scaled(self, factors: Sequence[float], before: float = 1.0, after: float = 1.0) -> ModelProfile:
        """Return this profile with scaled times.

        Args:
            factors: the factor of each layer.
            before: the factor of the code before the layers.
            after: the factor of the code after the layers.
        """
        layers = tuple(layer.scaled(factor) for layer, factor in zip(self.layers, factors, strict=True))
        return replace(self, layers=layers, before=self.before.scaled(before), after=self.after.scaled(after))

    def without_steps(self) -> ModelProfile:
        """Return this profile with optimizer steps that take no time."""
        return replace(self, layers=tuple(replace(layer, step=0.0) for layer in self.layers))

    @staticmethod
    def mean_of(profiles: Sequence[ModelProfile]) -> ModelProfile:
        """Return the first of several profiles of the same layers, with the mean seconds of all profiles.

        Profiles that did not measure a time are left out of its mean.
        """
        return replace(
            profiles[0],
            layers=tuple(map(LayerProfile.mean_of, zip(*(p.layers for p in profiles), strict=True))),
            before=LayerProfile.mean_of([p.before for p in profiles]),
            after=LayerProfile.mean_of([p.after for p in profiles]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as data that can be written as JSON."""
        return {"format": PROFILE_FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ModelProfile:
        """Return the profile from the result of `to_dict`, also after a round trip through JSON.

        Raises:
            InputError: if `found` is damaged or not a profile.
        """
        kinds = {"format": int, **field_types(cls), "layers": list[Any], "before": Any, "after": Any}
        parts = check_json_fields("profile", found, kinds, optional=_list_defaults(cls) | {"format"})
        parts.pop("format", None)
        parts["layers"] = tuple(_parse_layer(f"profile.layers[{n}]", each) for n, each in enumerate(parts["layers"]))
        parts |= {name: _parse_layer(f"profile.{name}", parts[name]) for name in ("before", "after") if name in parts}
        return cls(**parts)

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Return the profile from a file that `save` wrote.

        Raises:
            InputError: if the file is not a profile, or if it has a format that this version can't read.
        """
        try:
            found = read_object(path)
            if found.get("format", PROFILE_FORMAT) == PROFILE_FORMAT:
                return cls.from_dict(found)
        except InputError as error:
            raise InputError(f"{path} is not a profile that `lightning-pipes profile` wrote: {error}") from error
        raise InputError(
            f"{path} has format {short_repr(found['format'])}, this version reads {PROFILE_FORMAT}; profile again"
        )


def _parse_layer(where: str, found: object) -> LayerProfile:
    return LayerProfile(
        **check_json_fields(where, found, field_types(LayerProfile), optional=_list_defaults(LayerProfile))
    )


def _list_defaults(kind: type) -> frozenset[str]:
    """Return the names of the fields that have a default."""
    return frozenset(f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING)


Array = npt.NDArray[np.float64]


class LayerArrays:
    """The seconds and bytes of a model's parts as arrays.

    The parts are the code before the layers, the layers, and the code after the layers.

    Args:
        seconds: for each kind, a table of each part.
        numbers: for each name, a number of each part.
    """

    def __init__(self, seconds: Mapping[Kind, Sequence[Table]], numbers: Mapping[str, Sequence[float]]) -> None:
        self._tables = seconds
        self._numbers = {name: np.array(values, float) for name, values in numbers.items()}
        lines = [table for tables in seconds.values() for table in tables if len(table) > 1]  # others are constant
        self._rows = sorted({rows for table in lines for rows, _ in table}) or [1]
        self._seconds = {
            kind: np.array([[at_rows(table, rows) for rows in self._rows] for table in tables])
            for kind, tables in seconds.items()
        }
        self._at: dict[tuple[Kind, int], Array] = {}

    def stage_tables(self, kind: Kind, layers: Sequence[Span], speeds: Sequence[float]) -> list[Table]:
        """Return the table of the seconds of each stage.

        The tables have an entry for every number of rows that occurs in the table of any part. They are linear between
        entries, like the tables of the parts.

        Args:
            kind: the kind of computation.
            layers: the layers of each stage.
            speeds: the speed of each stage's device. If empty, all speeds are 1.
        """
        sums = _reduce_by_stage(self._seconds[kind], layers, np.add) / np.array(speeds or [1.0] * len(layers))[:, None]
        return [tuple(zip(self._rows, row, strict=True)) for row in sums.tolist()]

    def stage_sums(self, name: str, layers: Sequence[Span]) -> list[float]:
        """Return the sum of a number over the parts of each stage."""
        return list(_reduce_by_stage(self._numbers[name], layers, np.add).tolist())

    def stage_maxima(self, name: str, layers: Sequence[Span]) -> list[float]:
        """Return the maximum of a number over the parts of each stage."""
        return list(_reduce_by_stage(self._numbers[name], layers, np.maximum).tolist())

    def layer_values(self, name: str) -> Array:
        """Return a number of each layer, without the parts before and after the layers."""
        return self._numbers[name][1:-1]

    def seconds_at(self, kind: Kind, rows: int) -> Array:
        """Return the seconds of each part for the given number of rows."""
        known = self._at.get((kind, rows))
        if known is None:
            known = self._at[kind, rows] = np.array([at_rows(table, rows) for table in self._tables[kind]])
        return known


def _reduce_by_stage(values: Array, layers: Sequence[Span], join: np.ufunc) -> Array:
    """Reduce the values of the parts of each stage with `join`.

    The first stage includes the part before the layers, and the last stage the part after them. The result of an empty
    stage is 0.
    """
    starts = np.array([span.start + 1 for span in layers])
    stops = np.array([span.stop + 1 for span in layers])
    starts[0], stops[-1] = 0, len(values)
    filled = stops > starts
    found: Array = np.zeros((len(layers), *values.shape[1:]))
    found[filled] = join.reduceat(values, starts[filled])
    return found
