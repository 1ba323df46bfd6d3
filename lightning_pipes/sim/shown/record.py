"""The record of a run, kept so that a report can be written later, on any machine, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_pipes.cost import CostModel, ModelProfile
from lightning_pipes.cost.json_files import check_json_fields
from lightning_pipes.cost.links import LONGEST
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import InputError, Kind, Plan, PlanError, check_count, check_fields, check_number, short_repr
from lightning_pipes.ir.checks import field_types
from lightning_pipes.sim.shown.memory_use import describe_peaks, estimate_alternatives
from lightning_pipes.sim.shown.saved import costs_data, costs_of, read_json, timeline_data, timeline_of, write_json
from lightning_pipes.sim.shown.training_record import Curves, curves_of
from lightning_pipes.sim.timeline import Timeline

FILE = "run.json"
"""Its name in the directory of a run."""
_WRITTEN = ("predicted", "measured", "costs", "profile")
"""Entries that every file has, in a form of their own."""
_PLAIN = ("schedule", "memory", "between", "facts", "choice", "siblings", "peaks")
"""Entries that are written as they are."""


@dataclass(frozen=True)
class RunRecord:
    """One step of a run, as it was and as it was predicted.

    Attributes:
        predicted: the same order simulated with `costs`.
        costs: the medians of what was measured, and bytes where they are known.
        measured: None where nothing ran.
        schedule: its name.
        settings: of the schedule.
        profile: of the layers, where it is known.
        memory: bytes of every rank's device; None where nobody asked; empty for all of them.
        between: seconds from the end of one step of the pipeline to the start of the next; None if unknown.
        facts: whatever else there is to tell people, by name.
        choice: why this schedule was chosen, or this cut; lines of a table among them.
        siblings: how many trainings at a time shared the ranks, as in a job array. With more than one, what is idle in
            `measured` is idle for this one only.
        peaks: bytes that every rank needed at most while it trained; None where nothing counts them; empty for all.
        monitored: what a monitor saw on every rank while it trained; empty without one.
    """

    predicted: Timeline
    costs: CostModel = field(hash=False)
    measured: Timeline | None = None
    schedule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    profile: ModelProfile | None = None
    memory: tuple[int | None, ...] = ()
    between: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict, hash=False)
    choice: str = ""
    siblings: int = 1
    monitored: tuple[Curves, ...] = field(default=(), hash=False)
    peaks: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, entries=False)
        check_count("siblings", self.siblings)
        stages, ranks = self.plan.n_stages, self.plan.n_ranks
        if self.measured is not None and self.measured.plan.ranks != self.plan.ranks:
            raise InputError(f"measured has stages on ranks {self.measured.plan.ranks}, predicted on {self.plan.ranks}")
        if self.costs.n_stages != stages:
            raise InputError(f"costs are of {self.costs.n_stages} stages, the plan has {stages}")
        if len(self.memory) not in (0, ranks) or min((size for size in self.memory if size is not None), default=0) < 0:
            raise InputError(
                f"memory needs the bytes of each of {ranks} devices, or None, got {short_repr(self.memory)}"
            )
        if len(self.peaks) not in (0, ranks) or min((size for size in self.peaks if size is not None), default=0) < 0:
            raise InputError(f"peaks needs the bytes of each of {ranks} ranks, or None, got {short_repr(self.peaks)}")
        if len(self.monitored) not in (0, ranks):
            raise InputError(f"{len(self.monitored)} ranks were monitored, the plan has {ranks}")
        if self.between is not None:
            check_number("between", self.between, "finite seconds, not negative", lambda x: 0 <= x < LONGEST)
        layers = self.plan.layers
        if layers and self.profile is not None and layers[-1].stop != len(self.profile.layers):
            raise InputError(f"the plan has {layers[-1].stop} layers, the profile {len(self.profile.layers)}")

    @property
    def sibling_note(self) -> str:
        """A sentence about a training that was not alone; empty for one that was."""
        if self.siblings == 1:
            return ""
        return (
            f"This was one of up to {self.siblings} siblings at a time of a job array. Ranks computed for the others "
            "while it waited, so what is measured does not say how much they idled; the array's timeline does"
        )

    @property
    def memory_text(self) -> str:
        """Sentences on the peak of each rank; empty where nothing is known, or where siblings shared the ranks."""
        if self.siblings > 1:
            return ""
        predicted = self.predicted.peak_bytes if any(self.predicted.peak_bytes) else ()
        return describe_peaks(predicted, self.peaks, estimate_alternatives(self.plan, self.costs))

    @property
    def queues_text(self) -> str:
        """A line for each stage and direction on the inputs that waited there; empty where nothing was measured."""
        if self.measured is None or self.siblings > 1:
            return ""
        return "\n".join(
            f"stage {q.stage}, {'activations' if q.kind is Kind.F else 'gradients'}: {q.mean:.1f} waited on average, "
            f"slack {'-' if q.slack is None else q.slack}; {q.empty} of {len(q.lengths)} launches stalled, "
            f"{seconds_text(sum(q.stalled))} in all"
            for q in self.measured.input_queues
        )

    @property
    def plan(self) -> Plan:
        """The plan that was ordered."""
        return self.predicted.plan

    @property
    def displayed_timeline(self) -> Timeline:
        """The measured timeline, else the predicted one."""
        return self.measured or self.predicted

    @property
    def label(self) -> str:
        """The schedule with its settings, such as "kfkb k=2"."""
        return " ".join([self.schedule, *(f"{name}={value}" for name, value in self.settings.items())])

    def save(self, path: str | Path) -> None:
        """Writes JSON."""
        data: dict[str, Any] = {
            "predicted": timeline_data(self.predicted),
            "measured": None if self.measured is None else timeline_data(self.measured),
            "costs": costs_data(self.costs),
            "profile": None if self.profile is None else self.profile.to_dict(),
        }
        data |= {name: getattr(self, name) for name in _PLAIN}
        if self.monitored:
            data["monitored"] = [curves.to_dict() for curves in self.monitored]
        settings = {name: value if _is_plain(value) else repr(value) for name, value in self.settings.items()}
        write_json({**data, "settings": settings}, path)

    @classmethod
    def load(cls, path: str | Path) -> RunRecord:
        """Reads what `save` wrote; of a directory its run.json.

        Raises:
            InputError: there is no such file, or it is not one of these.
        """
        path = Path(path)
        if path.is_dir() and (path / FILE).exists():
            path = path / FILE
        if not path.is_file():
            raise InputError(
                f"there is no run in {path}: a run leaves a directory with {FILE} behind when its script calls "
                "strategy.report.save(directory) after fit, as examples/train.py does"
            )
        found = read_json(path, *_WRITTEN)
        del found["format"]
        try:
            return cls._of_data(found)
        except PlanError as error:
            raise InputError(f"{path} is damaged: {error}; run again to write another") from error

    @classmethod
    def _of_data(cls, data: Mapping[str, Any]) -> RunRecord:
        kinds = {**field_types(cls), **dict.fromkeys(_WRITTEN, Any), "monitored": list[Any]}
        found = check_json_fields("run", data, kinds, optional=field_types(cls).keys() - set(_WRITTEN))
        found["predicted"] = timeline_of(found["predicted"], "predicted")
        if found["measured"] is not None:
            found["measured"] = timeline_of(found["measured"], "measured")
        found["costs"] = costs_of(found["costs"])
        if found["profile"] is not None:
            found["profile"] = ModelProfile.from_dict(found["profile"])
        if "settings" in found:
            found["settings"] = {name: _tuples(value) for name, value in found["settings"].items()}
        rows = found.get("monitored", ())
        found["monitored"] = tuple(curves_of(row, f"monitored[{n}]") for n, row in enumerate(rows))
        return cls(**found)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _tuples(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
