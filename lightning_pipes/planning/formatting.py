"""Format schedules, cuts and changes as text for users, and show progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from typing import Any

from lightning_pipes.ir import Kind, Plan, Policy, Schedule, Span
from lightning_pipes.planning.planner import LATE, UNDECIDED, recompute_setting


def schedule_settings(schedule: Schedule | Policy) -> dict[str, Any]:
    """Return the settings of a schedule by name: all numbers, and other settings that differ from their defaults.

    A schedule that is not a dataclass has no settings.
    """
    found = {f.name: (getattr(schedule, f.name), f.default) for f in dataclass_fields(schedule)}
    return {name: value for name, (value, default) in found.items() if _is_number(value) or value != default}


def dataclass_fields(thing: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a dataclass, or an empty tuple for any other object."""
    return fields(thing) if is_dataclass(thing) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def schedule_label(schedule: Schedule | Policy) -> str:
    """Return the name of a schedule with its settings, such as "kfkb k=2"."""
    return " ".join([schedule.name, *(f"{name}={value}" for name, value in schedule_settings(schedule).items())])


def strategy_arguments(schedule: Schedule | Policy, plan: Plan) -> dict[str, Any]:
    """Return the arguments of `PipelineStrategy` that reproduce `plan`.

    `partition` is omitted if the plan has no layers. If stages recompute some of their micro-batches, `recompute` is
    "auto", which chooses them within the same memory.
    """
    found: dict[str, Any] = {"schedule": schedule.name, "microbatches": len(plan.spans(Kind.F, 0))}
    if settings := schedule_settings(schedule):
        found["schedule_args"] = settings
    if len(plan.layers) > 1:
        found["partition"] = [span.start for span in plan.layers[1:]]
    if any(plan.recompute):
        late = isinstance(schedule, Schedule) and not plan.early_recompute
        setting = recompute_setting(plan)
        found["recompute"] = [*setting] if isinstance(setting, tuple) else setting
        if plan.kept_microbatches:
            found["recompute"] = UNDECIDED
        elif late:
            found["recompute"] = LATE
    return found


def strategy_line(arguments: Mapping[str, Any]) -> str:
    """Return the call with these arguments.

    For example, `PipelineStrategy("kfkb", microbatches=8, schedule_args={"k": 2})`.
    """
    rest = [f"{name}={_format_literal(value)}" for name, value in arguments.items() if name != "schedule"]
    return f"PipelineStrategy({', '.join([_format_literal(arguments['schedule']), *rest])})"


def hydra_overrides(arguments: Mapping[str, Any]) -> str:
    """Return the overrides for a Hydra app with the config groups of lightning_pipes: `schedule=kfkb schedule.k=2`."""
    named = {f"schedule.{name}": value for name, value in arguments.get("schedule_args", {}).items()}
    others = {name: value for name, value in arguments.items() if name not in ("schedule", "schedule_args")}
    named |= {f"pipeline.{name}": value for name, value in others.items()}
    return " ".join(
        [f"schedule={arguments['schedule']}", *(f"{name}={_format_override(v)}" for name, v in named.items())]
    )


def _format_override(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_format_override, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format_literal(key)}: {_format_literal(v)}" for key, v in value.items()) + "}"
    return repr(value)


def describe_moves(before: Sequence[Span], after: Sequence[Span]) -> list[str]:
    """Return descriptions of the layers that move between stages, such as "layers 11-12 from stage 2 to stage 1".

    Args:
        before: the layers of each stage before the change.
        after: the layers of each stage after the change.
    """
    found = []
    for stage, (a, b) in enumerate(zip(before[1:], after[1:], strict=True)):
        if b.start < a.start:
            found.append(f"{layers_text(Span(b.start, a.start))} from stage {stage} to stage {stage + 1}")
        elif b.start > a.start:
            found.append(f"{layers_text(Span(a.start, b.start))} from stage {stage + 1} to stage {stage}")
    return found


def layers_text(span: Span) -> str:
    """Return the layers of a span as text, such as "layer 3", "layers 3-5", or "no layer"."""
    if span.rows < 1:
        return "no layer"
    return f"layer {span.start}" if span.rows == 1 else f"layers {span.start}-{span.stop - 1}"


def join_words(words: Sequence[str]) -> str:
    """Return the words as a list in a sentence, such as "a", "a and b", or "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


Progress = Callable[[str, float], None]
"""A function that receives a description of the current step and the share of the work that is done, from 0 to 1."""


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar on stderr if stderr is a terminal and the work takes longer than one second."""
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
    with tqdm(total=1.0, desc=title, delay=1.0, leave=False, bar_format=form, disable=not sys.stderr.isatty()) as bar:

        def show_progress(what: str, done: float) -> None:
            bar.set_description_str(f"{title}: {what}"[:60], refresh=False)
            bar.update(max(0.0, done - bar.n))

        yield show_progress
