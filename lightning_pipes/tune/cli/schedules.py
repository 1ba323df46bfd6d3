"""The command `lightning-pipes schedules`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, PipelineError, Policy, Program, Schedule, verify
from lightning_pipes.ir.registry import installed_schedules, make_schedule
from lightning_pipes.planning.formatting import dataclass_fields
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.sim import Timeline, simulate
from lightning_pipes.sim.records.memory_use import held_samples
from lightning_pipes.tune.cli.command import Command, format_table, print_json

LISTED_RANKS, LISTED_MICROBATCHES = 4, 8
_LISTED_BATCHES = 12  # for schedules that do not flush, whose first and last batches are left out


def run(settings: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """List the installed schedules, with an example of each."""
    found = [_described(name, entry.load()) for name, entry in installed_schedules().items()]
    if options.json:
        print_json({"ranks": LISTED_RANKS, "microbatches": LISTED_MICROBATCHES, "schedules": found})
        return
    rows = [
        {
            "schedule": each["name"],
            "settings": " ".join(f"{k}={v}" for k, v in each["settings"].items()) or "-",
            "bubble": f"{each['bubble']:.0%}" if "bubble" in each else "-",
            "held": f"{each['held']:g}" if "held" in each else "-",
            "what it does": each["about"],
        }
        for each in found
    ]
    print(format_table(rows))
    print(
        "\nbubble: the share of time that ranks idle; held: the most micro-batches on one rank. Both simulated with\n"
        f"the settings shown, on {LISTED_RANKS} equal ranks and {LISTED_MICROBATCHES} micro-batches, "
        "backwards twice as long as\nforwards, free links."
    )


def _described(name: str, factory: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "settings": {}, "about": _first_sentence(inspect.getdoc(factory) or "")}
    try:
        schedule = make_schedule(name)
        found["settings"] = {f.name: getattr(schedule, f.name) for f in dataclass_fields(schedule)}
        found |= _example(schedule)
    except PipelineError as error:
        found["about"] += f" (no example: {error})"
    return found


def _example(schedule: Schedule | Policy) -> dict[str, Any]:
    plan = solve_plan(Problem(schedule, LISTED_RANKS, LISTED_MICROBATCHES, LISTED_MICROBATCHES))
    a_rank = plan.n_stages / LISTED_RANKS  # number of stages among which the time of a rank is divided
    costs = CostModel.uniform(plan.n_stages, 1.0 / a_rank, 2.0 / a_rank)
    order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
    batches = _LISTED_BATCHES if order.is_endless else None
    run = simulate(order, plan, costs, batches=batches)
    if isinstance(order, Program):
        verify(order, plan, batches)
    else:
        verify(run.program(), run.plan)
    found = {"bubble": round(_bubble(run, batches), 4), "held": round(max(held_samples(run)), 2)}
    return found | {"versions": max(plan.versions), "needs_flush": batches is None}


def _bubble(run: Timeline, batches: int | None) -> float:
    if batches is None:
        return sum(run.bubble) / len(run.bubble)
    ends = sorted(e.end for e in run.computations if e.instruction.kind is Kind.STEP and e.instruction.stage == 0)
    first, last = 2, len(ends) - 3  # steps far from the start and the end of the run
    return 1 - (last - first) * 3e9 * LISTED_MICROBATCHES / (ends[last] - ends[first])


def _first_sentence(text: str) -> str:
    """Return the first sentence of a docstring without its citation.

    If the part before a colon is long enough, the part after the colon is omitted too.
    """
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.sub(r" \([^)]*\d{4}[^)]*\)", "", paragraph).split(". ")[0].rstrip(".")
    head = sentence.split(": ")[0]
    return head if len(head) > 30 else sentence


COMMAND = Command(
    "schedules",
    "Lists the installed schedules.",
    ["lightning-pipes schedules", "lightning-pipes schedules --json"],
    run,
)
