"""Plans, cost models and timelines as plain data for JSON, and back exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import Cut, Instruction, Kind, Plan, PlanError, Span
from lightning_pipes.sim.event import Event
from lightning_pipes.sim.timeline import Timeline

FORMAT = 1
"""Of files with timelines in them; raised when a reader of an older one would misread it."""


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Writes JSON, from which `load_timeline` makes an equal timeline."""
    write_json({"timeline": timeline_data(timeline)}, path)


def load_timeline(path: str | Path) -> Timeline:
    """The timeline that `save_timeline` wrote.

    Raises:
        PlanError: the file holds no timeline, or is of a format that this version does not read.
    """
    return timeline_of(read_json(path, "timeline")["timeline"])


def write_json(data: Mapping[str, Any], path: str | Path) -> None:
    """Writes `data` with the number of the format."""
    Path(path).write_text(json.dumps({"format": FORMAT, **data}, separators=(",", ":")), encoding="utf-8")


def read_json(path: str | Path, *keys: str) -> dict[str, Any]:
    """The record that `write_json` wrote.

    Raises:
        PlanError: it is not JSON, lacks one of `keys`, or is of another format.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise PlanError(f"{path} can't be read: {error}") from error
    lacking = [key for key in ("format", *keys) if not isinstance(found, dict) or key not in found]
    if lacking:
        raise PlanError(f"{path} is not what a report is saved in: it has no {' and no '.join(map(repr, lacking))}")
    if found["format"] != FORMAT:
        raise PlanError(f"{path} has format {found['format']}, this version reads {FORMAT}; run again")
    return dict(found)


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """A row of numbers an event, and the plan."""
    return {
        "name": timeline.name,
        "attributes": dict(timeline.attributes),
        "peak_bytes": list(timeline.peak_bytes),
        "plan": plan_data(timeline.plan),
        "events": [[rank, *_instruction_data(i), start, end] for rank, i, start, end in timeline.events],
    }


def timeline_of(data: Mapping[str, Any]) -> Timeline:
    """The timeline of `timeline_data`."""
    events = tuple(Event(rank, _instruction(i), start, end) for rank, *i, start, end in data["events"])
    return Timeline(events, plan_of(data["plan"]), tuple(data["peak_bytes"]), data["name"], dict(data["attributes"]))


def plan_data(plan: Plan) -> dict[str, Any]:
    """Every field; spans that many stages share are listed once."""
    tables: dict[tuple[Span, ...], int] = {}

    def number(spans: tuple[Span, ...]) -> int:
        return tables.setdefault(spans, len(tables))

    found = {f.name: getattr(plan, f.name) for f in fields(plan)}
    found["jobs"] = [
        {"rows": cut.rows} | {name: [number(spans) for spans in getattr(cut, name)] for name in _TABLES}
        for cut in plan.jobs
    ]
    found["after"] = [
        [_instruction_data(i), [_instruction_data(n) for n in before]] for i, before in plan.after.items()
    ]
    return {**found, "spans": list(tables)}


def plan_of(data: Mapping[str, Any]) -> Plan:
    """The plan of `plan_data`."""
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list | tuple) else value for key, value in data.items()
    }
    tables = [tuple(Span(*span) for span in spans) for spans in plain.pop("spans")]
    plain["jobs"] = tuple(
        Cut(job["rows"], *(tuple(tables[number] for number in job[name]) for name in _TABLES)) for job in data["jobs"]
    )
    plain["layers"] = tuple(Span(*span) for span in data["layers"])
    plain["after"] = {_instruction(i): tuple(map(_instruction, before)) for i, before in data["after"]}
    return Plan(**plain)


def costs_data(costs: CostModel) -> dict[str, Any]:
    """Every field; what is listed by a pair becomes rows."""
    found = {f.name: getattr(costs, f.name) for f in fields(costs)}
    found["seconds"] = [[kind.value, stage, table] for (kind, stage), table in costs.seconds.items()]
    found["links"] = [[*pair, *astuple(link)] for pair, link in costs.links.items()]
    found["link"] = astuple(costs.link)
    return found


def costs_of(data: Mapping[str, Any]) -> CostModel:
    """The cost model of `costs_data`."""
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    plain["seconds"] = {(Kind(kind), stage): tuple(map(tuple, table)) for kind, stage, table in data["seconds"]}
    plain["links"] = {(a, b): Link(*link) for a, b, *link in data["links"]}
    plain["link"] = Link(*data["link"])
    return CostModel(**plain)


_TABLES = ("forward", "backward", "forward_links", "backward_links")


def _instruction_data(i: Instruction) -> list[Any]:
    return [i.kind.value, i.stage, i.job, i.batch, *i.span]


def _instruction(data: list[Any]) -> Instruction:
    kind, stage, job, batch, start, stop = data
    return Instruction(Kind(kind), stage, job, batch, Span(start, stop))
