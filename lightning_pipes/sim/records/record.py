"""The record of a run. It is saved so that a report can be created later on any machine, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_pipes.cost import CostModel, Link, ModelProfile, Table
from lightning_pipes.cost.links import MAX_SECONDS, regime_named
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import (
    RECEIVE_KINDS,
    Cut,
    InputError,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Span,
    check_count,
    check_fields,
    check_number,
    check_type,
    short_repr,
)
from lightning_pipes.ir.checks import check_json_fields, field_types, read_object
from lightning_pipes.sim.records.memory_use import describe_peaks, estimate_alternatives
from lightning_pipes.sim.records.training_record import Curves, curves_of
from lightning_pipes.sim.timeline import Event, Timeline

TIMELINE_FORMAT = 2
"""The format of files that contain timelines. It increases if a reader of an older format would misread a new file."""


def write_json(data: Mapping[str, Any], path: str | Path) -> None:
    """Write `data` together with the number of the format."""
    Path(path).write_text(json.dumps({"format": TIMELINE_FORMAT, **data}, separators=(",", ":")), encoding="utf-8")


def read_json(path: str | Path, *keys: str) -> dict[str, Any]:
    """Return the data that `write_json` wrote.

    Raises:
        InputError: the file is not JSON, lacks one of `keys`, or has another format.
    """
    found = read_object(path)
    lacking = [key for key in ("format", *keys) if key not in found]
    if lacking:
        raise InputError(f"{path} is not the file of a saved report: it has no {' and no '.join(map(repr, lacking))}")
    if found["format"] != TIMELINE_FORMAT:
        raise InputError(
            f"{path} has format {short_repr(found['format'])}, this version reads {TIMELINE_FORMAT}; run again"
        )
    return found


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as plain data: its plan, and one row of numbers for each event."""
    return {
        "name": timeline.name,
        "attributes": dict(timeline.attributes),
        "peak_bytes": list(timeline.peak_bytes),
        "regimes": None if timeline.regimes is None else list(timeline.regimes),
        "plan": plan_data(timeline.plan),
        "events": [[rank, *_instruction_data(i), start, end] for rank, i, start, end in timeline.events],
    }


def timeline_of(data: object, what: str = "timeline") -> Timeline:
    """Return the timeline from `timeline_data`. Error messages name it `what`.

    Raises:
        InputError: the data is not a timeline, or is damaged.
    """
    kinds = {"name": str, "attributes": dict[str, str], "peak_bytes": tuple[int, ...], "plan": Any, "events": list[Any]}
    kinds |= {"regimes": Any}
    found = check_json_fields(what, data, kinds, optional=["regimes"])  # missing in older files
    regimes = check_type(f"{what}.regimes", found.get("regimes"), tuple[str, ...] | None)
    found["regimes"] = None if regimes is None else tuple(map(regime_named, regimes))
    plan = plan_of(found["plan"], f"{what}.plan")
    events = tuple(_parse_event(f"{what}.events[{n}]", row, plan) for n, row in enumerate(found["events"]))
    if len(found["peak_bytes"]) not in (0, plan.n_ranks):
        raise InputError(f"{what}.peak_bytes has {len(found['peak_bytes'])} ranks, but the plan has {plan.n_ranks}")
    return Timeline(events, plan, found["peak_bytes"], found["name"], found["attributes"], found["regimes"])


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return all fields of a plan as plain data. Spans that several stages share are stored once."""
    tables: dict[tuple[Span, ...], int] = {}

    def number(spans: tuple[Span, ...]) -> int:
        return tables.setdefault(spans, len(tables))

    found = {f.name: getattr(plan, f.name) for f in fields(plan)}
    found["jobs"] = [
        {"rows": cut.rows} | {name: [number(spans) for spans in getattr(cut, name)] for name in _COST_TABLES}
        for cut in plan.jobs
    ]
    found["after"] = [
        [_instruction_data(i), [_instruction_data(n) for n in before]] for i, before in plan.after.items()
    ]
    return {**found, "spans": list(tables)}


def plan_of(data: object, what: str = "plan") -> Plan:
    """Return the plan from `plan_data`. Error messages name it `what`.

    Raises:
        InputError: the data is not a plan, or is damaged.
    """
    pairs = tuple[tuple[int, int], ...]
    kinds = {**field_types(Plan), "jobs": list[Any], "layers": pairs, "after": list[list[Any]], "spans": list[pairs]}
    found = check_json_fields(
        what, data, kinds, optional=["whole_forward", "early_recompute", "kept_microbatches"]
    )  # missing in older files
    tables = [tuple(Span(*span) for span in spans) for spans in found.pop("spans")]
    found["jobs"] = tuple(_parse_cut(f"{what}.jobs[{n}]", job, tables) for n, job in enumerate(found["jobs"]))
    found["layers"] = tuple(Span(*span) for span in found["layers"])
    found["after"] = dict(_parse_waits(f"{what}.after[{n}]", row) for n, row in enumerate(found["after"]))
    return Plan(**found)


def costs_data(costs: CostModel) -> dict[str, Any]:
    """Return all fields of a cost model as plain data. Mappings with pairs as keys become rows."""
    found = {f.name: getattr(costs, f.name) for f in fields(costs)}
    found["seconds"] = [[kind.value, stage, table] for (kind, stage), table in costs.seconds.items()]
    found["links"] = [[*pair, *astuple(link)] for pair, link in costs.links.items()]
    found["link"] = astuple(costs.link)
    found["each"] = [[*_instruction_data(i), seconds] for i, seconds in costs.each.items()]
    found["scatter"] = [[kind.value, stage, list(ratios)] for (kind, stage), ratios in costs.scatter.items()]
    return found


def costs_of(data: object, what: str = "costs") -> CostModel:
    """Return the cost model from `costs_data`. Error messages name it `what`.

    Raises:
        InputError: the data is not a cost model, or is damaged.
    """
    rows = list[list[Any]]
    kinds = {**field_types(CostModel), "seconds": list[tuple[str, int, Table]], "links": rows, "link": list[Any]}
    kinds |= {"each": rows, "scatter": list[tuple[str, int, tuple[float, ...]]]}
    found = check_json_fields(what, data, kinds, optional=["regime", "each", "scatter"])  # missing in older files
    found["seconds"] = {(_parse_kind(f"{what}.seconds", kind), stage): table for kind, stage, table in found["seconds"]}
    found["links"] = dict(_parse_between(f"{what}.links[{n}]", row) for n, row in enumerate(found["links"]))
    found["link"] = _parse_link(f"{what}.link", found["link"])
    found["each"] = dict(_parse_single(f"{what}.each[{n}]", row) for n, row in enumerate(found.get("each", ())))
    found["scatter"] = {
        (_parse_kind(f"{what}.scatter", kind), stage): ratios for kind, stage, ratios in found.get("scatter", ())
    }
    return CostModel(**found)


_COST_TABLES = ("forward", "backward", "forward_links", "backward_links")


def _instruction_data(i: Instruction) -> list[Any]:
    return [i.kind.value, i.stage, i.job, i.batch, *i.span]


def _parse_instruction(where: str, data: object) -> Instruction:
    if not isinstance(data, list) or len(data) != 6 or not all(type(each) is int for each in data[1:]):
        raise InputError(
            f"{where} needs a kind, stage, job, batch, and the first and last sample, got {short_repr(data)}"
        )
    kind, stage, job, batch, start, stop = data
    if min(stage, job, batch, start) < 0 or stop < start:
        raise InputError(f"{where} counts stages, jobs, batches and samples from 0, got {short_repr(data)}")
    return Instruction(_parse_kind(where, kind), stage, job, batch, Span(start, stop))


def _parse_kind(where: str, name: object) -> Kind:
    if not isinstance(name, str) or name not in Kind.__members__:
        raise InputError(f"{where}: there is no instruction {short_repr(name)}; there is {', '.join(Kind)}")
    return Kind(name)


def _parse_event(where: str, row: object, plan: Plan) -> Event:
    if not isinstance(row, list) or len(row) != 9 or not all(type(row[n]) is int for n in (0, 7, 8)):
        raise InputError(f"{where} needs a rank, an instruction, its start and its end, got {short_repr(row)}")
    rank, *data, start, end = row
    i = _parse_instruction(where, data)
    if i.stage >= plan.n_stages or i.job >= len(plan.jobs) or plan.rank_of(i) != rank:
        raise InputError(f"{where}: the plan has no stage {i.stage} of job {i.job} on rank {short_repr(rank)}")
    if (
        i.kind in RECEIVE_KINDS
        or (i.kind is Kind.SF and i.stage == plan.n_stages - 1)
        or (i.kind is Kind.SB and not i.stage)
    ):
        raise InputError(f"{where}: {i} is not a transfer of the plan. Only sends to an existing stage are recorded")
    if not 0 <= start <= end < MAX_SECONDS * 1e9:
        raise InputError(
            f"{where} ends before it starts, or times are out of range: {short_repr(start)} to {short_repr(end)} ns"
        )
    return Event(rank, i, start, end)


def _parse_cut(where: str, job: object, tables: Sequence[tuple[Span, ...]]) -> Cut:
    found = check_json_fields(where, job, {"rows": int, **dict.fromkeys(_COST_TABLES, tuple[int, ...])})
    for name in _COST_TABLES:
        if not all(0 <= number < len(tables) for number in found[name]):
            raise InputError(
                f"{where}.{name} names one of {len(tables)} tables of spans, got {short_repr(found[name])}"
            )
    return Cut(found["rows"], *(tuple(tables[number] for number in found[name]) for name in _COST_TABLES))


def _parse_waits(where: str, row: Sequence[Any]) -> tuple[Instruction, tuple[Instruction, ...]]:
    if len(row) != 2 or not isinstance(row[1], list):
        raise InputError(
            f"{where} needs an instruction and a list of the instructions that it waits for, got {short_repr(row)}"
        )
    return _parse_instruction(where, row[0]), tuple(_parse_instruction(where, each) for each in row[1])


def _parse_between(where: str, row: Sequence[Any]) -> tuple[tuple[int, int], Link]:
    pair = check_type(where, list(row[:2]), tuple[int, int])
    return pair, _parse_link(where, row[2:])


def _parse_single(where: str, row: Sequence[Any]) -> tuple[Instruction, float]:
    return _parse_instruction(where, list(row[:-1])), check_number(f"{where}, seconds,", row[-1] if row else None)


def _parse_link(where: str, values: Sequence[Any]) -> Link:
    if len(values) > len(fields(Link)):
        raise InputError(f"{where}: a link has {len(fields(Link))} values, got {short_repr(values)}")
    return Link(*values)


RUN_FILE = "run.json"
"""The name of the file in the directory of a run."""
PADDING_FACT = "padding"
"""The name of the fact that contains advice on padding."""
_TIMELINE_KEYS = ("predicted", "measured", "replayed")
_CONVERTED_KEYS = (*_TIMELINE_KEYS, "costs", "profile")
"""Entries that every file contains and that have a conversion of their own."""
_UNCONVERTED_KEYS = ("schedule", "memory", "between", "facts", "choice", "siblings", "peaks", "unpredicted")
"""Entries that are written without conversion."""


@dataclass(frozen=True)
class RunRecord:
    """One step of a run, or of a plan that has not run.

    Attributes:
        predicted: the step, simulated before it ran with the times that were known then; None if no times were known.
        costs: the medians of the measured times, and the bytes as far as they are known. For a plan, the times of its
            simulation.
        measured: the measured step; None for a plan.
        replayed: the measured step, simulated with the recorded time of each of its operations. This is not a
            prediction. It differs from `measured` by the time that belongs to no operation. None for a plan.
        schedule: the name of the schedule.
        settings: the settings of the schedule.
        profile: the profile of the layers, if it is known.
        memory: the bytes of the device of every rank; None for a rank whose device was not queried; empty if this holds
            for all ranks.
        between: the seconds from the end of one step of the pipeline to the start of the next; None if unknown.
        facts: further information for the user, by name.
        choice: why this schedule or this cut was chosen. The text may include a table.
        siblings: the number of trainings that shared the ranks at the same time, for example in a job array. If there
            are several, idle time in `measured` is idle only for this training.
        monitored: the metrics that a monitor recorded on every rank during training; empty without a monitor.
        peaks: the peak memory of every rank during training in bytes. On a GPU, it is the allocated memory. On a CPU,
            it is the resident memory of the process beyond its memory after the imports. None for a rank that was not
            measured; empty if no rank was measured.
        unpredicted: the reason why a measured step was not predicted, as a sentence without its full stop.
    """

    predicted: Timeline | None
    costs: CostModel = field(hash=False)
    measured: Timeline | None = None
    replayed: Timeline | None = None
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
    unpredicted: str = ""

    def __post_init__(self) -> None:
        check_fields(self, entries=False)
        if (self.measured is None) != (self.replayed is None) or (self.measured or self.predicted) is None:
            raise InputError("a record needs a step that was measured and replayed, or one that was predicted")
        check_count("siblings", self.siblings)
        stages, ranks = self.plan.n_stages, self.plan.n_ranks
        for name, other in (("predicted", self.predicted), ("replayed", self.replayed)):
            if other is not None and other.plan.ranks != self.plan.ranks:
                raise InputError(f"measured has stages on ranks {self.plan.ranks}, {name} on {other.plan.ranks}")
        if self.costs.n_stages != stages:
            raise InputError(f"costs are of {self.costs.n_stages} stages, but the plan has {stages}")
        if len(self.memory) not in (0, ranks) or min((size for size in self.memory if size is not None), default=0) < 0:
            raise InputError(
                f"memory needs the bytes of each of {ranks} devices, or None, got {short_repr(self.memory)}"
            )
        if len(self.peaks) not in (0, ranks) or min((size for size in self.peaks if size is not None), default=0) < 0:
            raise InputError(f"peaks needs the bytes of each of {ranks} ranks, or None, got {short_repr(self.peaks)}")
        if len(self.monitored) not in (0, ranks):
            raise InputError(f"{len(self.monitored)} ranks were monitored, but the plan has {ranks}")
        if self.between is not None:
            check_number("between", self.between, "finite seconds, not negative", lambda x: 0 <= x < MAX_SECONDS)
        layers = self.plan.layers
        if layers and self.profile is not None and layers[-1].stop != len(self.profile.layers):
            raise InputError(f"the plan has {layers[-1].stop} layers, but the profile has {len(self.profile.layers)}")

    @property
    def sibling_note(self) -> str:
        """A sentence about a training that shared its ranks with siblings; empty for a training without siblings."""
        if self.siblings == 1:
            return ""
        return (
            f"This was one of up to {self.siblings} siblings at a time of a job array. Ranks computed for the others "
            "while it waited, so this run has no bubble of its own. JobArray.timeline has the bubble of all siblings"
        )

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The estimated peak memory of the tensors on every rank, from `costs`; empty if bytes are not known."""
        peaks = self.simulated_timeline.peak_bytes
        return peaks if any(peaks) else ()

    @property
    def peaks_are_resident(self) -> bool:
        """Whether `peaks` contains the memory of whole processes, as on CPUs.

        This memory is not comparable with the memory of tensors.
        """
        return all(limit is None for limit in self.memory)

    @property
    def bubble(self) -> float | None:
        """The mean share of the displayed step in which ranks do not compute, from 0 to 1; None with siblings."""
        return None if self.siblings > 1 else self.displayed_timeline.mean_bubble

    @property
    def prediction_text(self) -> str:
        """A comparison of the predicted and the measured step, or the reason for a missing prediction.

        The text has no full stop at its end.
        """
        if self.measured is None or self.siblings > 1:
            return ""
        if self.predicted is None:
            return f"Nothing was predicted: {self.unpredicted or 'the times of layers were not known before training'}"
        off = self.predicted.makespan / max(self.measured.makespan, 1) - 1
        return f"Predicted before it ran: {seconds_text(self.predicted.step)} ({off:+.0%})"

    @property
    def memory_text(self) -> str:
        """Sentences on the peak memory of each rank; empty if nothing is known, or if siblings shared the ranks."""
        if self.siblings > 1:
            return ""
        others = estimate_alternatives(self.plan, self.costs)
        return describe_peaks(self.peak_bytes, self.peaks, others, self.peaks_are_resident)

    @property
    def queues_text(self) -> str:
        """One line for each stage and direction on the inputs that waited there.

        The text is empty if nothing was measured, or if siblings shared the ranks.
        """
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
        """The plan of the displayed step."""
        return self.displayed_timeline.plan

    @property
    def displayed_timeline(self) -> Timeline:
        """The measured timeline or, for a plan, the predicted one."""
        found = self.measured or self.predicted
        assert found is not None
        return found

    @property
    def simulated_timeline(self) -> Timeline:
        """The timeline that was simulated with `costs`: the replay or, for a plan, the predicted timeline."""
        found = self.replayed or self.predicted
        assert found is not None
        return found

    @property
    def label(self) -> str:
        """The name of the schedule with its settings, such as "kfkb k=2"."""
        return " ".join([self.schedule, *(f"{name}={value}" for name, value in self.settings.items())])

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        data: dict[str, Any] = {
            **{name: None if each is None else timeline_data(each) for name, each in self._timelines.items()},
            "costs": costs_data(self.costs),
            "profile": None if self.profile is None else self.profile.to_dict(),
        }
        data |= {name: getattr(self, name) for name in _UNCONVERTED_KEYS}
        if self.monitored:
            data["monitored"] = [curves.to_dict() for curves in self.monitored]
        settings = {name: value if _is_plain(value) else repr(value) for name, value in self.settings.items()}
        write_json({**data, "settings": settings}, path)

    @property
    def _timelines(self) -> dict[str, Timeline | None]:
        return {name: getattr(self, name) for name in _TIMELINE_KEYS}

    @classmethod
    def load(cls, path: str | Path) -> RunRecord:
        """Return the record that `save` wrote.

        Args:
            path: the file, or a directory that contains run.json.

        Raises:
            InputError: the file does not exist, or is not a record.
        """
        path = Path(path)
        if path.is_dir() and (path / RUN_FILE).exists():
            path = path / RUN_FILE
        if not path.is_file():
            raise InputError(
                f"there is no run in {path}: {RUN_FILE} is written when a script calls strategy.report.save(directory) "
                "after fit, as examples/train.py does"
            )
        found = read_json(path, *_CONVERTED_KEYS)
        del found["format"]
        try:
            return cls._of_data(found)
        except PlanError as error:
            raise InputError(f"{path} is damaged: {error}; run again to write a new one") from error

    @classmethod
    def _of_data(cls, data: Mapping[str, Any]) -> RunRecord:
        kinds = {**field_types(cls), **dict.fromkeys(_CONVERTED_KEYS, Any), "monitored": list[Any]}
        found = check_json_fields("run", data, kinds, optional=field_types(cls).keys() - set(_CONVERTED_KEYS))
        for name in _TIMELINE_KEYS:
            if found[name] is not None:
                found[name] = timeline_of(found[name], name)
        found["costs"] = costs_of(found["costs"])
        if found["profile"] is not None:
            found["profile"] = ModelProfile.from_dict(found["profile"])
        if "settings" in found:
            found["settings"] = {name: _to_tuples(value) for name, value in found["settings"].items()}
        rows = found.get("monitored", ())
        found["monitored"] = tuple(curves_of(row, f"monitored[{n}]") for n, row in enumerate(rows))
        return cls(**found)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _to_tuples(value: Any) -> Any:
    """Convert lists to tuples, because JSON has only lists."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
