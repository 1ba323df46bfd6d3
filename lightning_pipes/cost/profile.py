"""The costs of layers, one by one, as measured on a device or computed from shapes; stages are sums of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_pipes.cost.json_files import check_json_fields, read_object
from lightning_pipes.cost.layer import LayerProfile, per_row
from lightning_pipes.cost.layer_arrays import LayerArrays
from lightning_pipes.cost.model import CostModel
from lightning_pipes.cost.table import at_rows
from lightning_pipes.ir import MOST_STAGES, InputError, Kind, Span, check_fields, check_number, shown
from lightning_pipes.ir.checks import hints

FORMAT = 1
"""Of the file; raised when a reader of an older one would misread it."""
MAX_LAYERS = MOST_STAGES
"""More would never be cut apart."""
LEAST_ROWS = "least_rows"
"""In a profile's notes: the fewest samples that the model was found to run on, where fewer were tried in vain."""
_NOTHING_BEFORE, _NOTHING_AFTER = (LayerProfile(name, ((1, 0.0),), ((1, 0.0),)) for name in ("before", "after"))


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model, in order.

    Attributes:
        before: what the first stage runs before the layers, such as user code; its output is what enters them.
        after: what the last stage runs after them, such as the loss.
        overhead: seconds that a rank spends before each computation.
        joining: seconds per byte of samples that are joined from parts; see `CostModel`.
        widened: bytes of gradients on their way between replicas, as a multiple of those in memory: 2 for half
            precision, which the engine sums in float32.
        device: what was measured, for people.
        source: how it came about: "measured", or the formula.

    Raises:
        InputError: no layers.
    """

    layers: tuple[LayerProfile, ...]
    before: LayerProfile = _NOTHING_BEFORE
    after: LayerProfile = _NOTHING_AFTER
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

    @property
    def has_split(self) -> bool:
        """Whether the backward of every layer with weights was measured in its two parts."""
        parts = (self.before, *self.layers, self.after)
        return all(part.input_backward and part.weight_backward for part in parts if part.gradient_bytes)

    @property
    def least_rows(self) -> int:
        """The fewest samples of a micro-batch that the model runs on, as far as it is known."""
        return int(self.notes.get(LEAST_ROWS, 1))

    def seconds(self, kind: Kind, layer: int, rows: int) -> float:
        """Seconds of one computation of a layer; STEP has no rows.

        Raises:
            InputError: I or W, which were not measured.
        """
        found = self.layers[layer]
        if kind is Kind.STEP:
            return found.step
        return at_rows(found.seconds_of(kind), rows)

    @cached_property
    def layer_arrays(self) -> LayerArrays:
        """All numbers as arrays."""
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
        """The computations with rows whose seconds it knows."""
        return (Kind.F, Kind.B, Kind.I, Kind.W) if self.has_split else (Kind.F, Kind.B)

    def stage_costs(self, layers: Sequence[Span], speeds: Sequence[float] = ()) -> CostModel:
        """Seconds and bytes of the stages that `layers` cuts; `speeds` divide the times of each stage, and links are
        free until `CostModel.on_cluster` gives some."""
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
        """Bytes per row that pass between layer `cut - 1` and layer `cut`."""
        return per_row(self.layers[cut - 1].output if cut else self.before.output)

    def activation_bytes(self, layers: Sequence[Span], stage: int) -> int:
        """Bytes per row that a stage keeps from F to B, its input included where its first layer keeps that."""
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
        """The same where each layer's forward and backward take that many times as long, as does what runs `before` and
        `after` the layers."""
        layers = tuple(layer.scaled(factor) for layer, factor in zip(self.layers, factors, strict=True))
        return replace(self, layers=layers, before=self.before.scaled(before), after=self.after.scaled(after))

    def without_steps(self) -> ModelProfile:
        """The same where steps of optimizers take no time: up to them."""
        return replace(self, layers=tuple(replace(layer, step=0.0) for layer in self.layers))

    @staticmethod
    def mean_of(profiles: Sequence[ModelProfile]) -> ModelProfile:
        """The first of several profiles of the same layers with the mean seconds of all; an end that one has not
        measured is empty there."""
        return replace(
            profiles[0],
            layers=tuple(map(LayerProfile.mean_of, zip(*(p.layers for p in profiles), strict=True))),
            before=LayerProfile.mean_of([p.before for p in profiles]),
            after=LayerProfile.mean_of([p.after for p in profiles]),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ModelProfile:
        """The profile of `data`, after its way through JSON.

        Raises:
            InputError: it is another object, or damaged.
        """
        kinds = {"format": int, **hints(cls), "layers": list[Any], "before": Any, "after": Any}
        parts = check_json_fields("profile", found, kinds, optional=_defaults(cls) | {"format"})
        parts.pop("format", None)
        parts["layers"] = tuple(_layer(f"profile.layers[{n}]", each) for n, each in enumerate(parts["layers"]))
        parts |= {name: _layer(f"profile.{name}", parts[name]) for name in ("before", "after") if name in parts}
        return cls(**parts)

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Reads what `save` wrote.

        Raises:
            InputError: the file is no profile, or of a format that this version does not read.
        """
        try:
            found = read_object(path)
            if found.get("format", FORMAT) == FORMAT:
                return cls.from_dict(found)
        except InputError as error:
            raise InputError(f"{path} is no profile that `lightning-pipes profile` wrote: {error}") from error
        raise InputError(f"{path} has format {shown(found['format'])}, this version reads {FORMAT}; profile again")


def _layer(where: str, found: object) -> LayerProfile:
    return LayerProfile(**check_json_fields(where, found, hints(LayerProfile), optional=_defaults(LayerProfile)))


def _defaults(kind: type) -> frozenset[str]:
    """The fields that have a default."""
    return frozenset(f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING)
