"""Check that docs/schedules.md lists every schedule and that its formulas agree with the simulator."""

import re
from dataclasses import fields
from math import ceil
from pathlib import Path

import pytest

from lightning_pipes.ir import Plan, Schedule, adapt_plan
from lightning_pipes.ir.registry import installed_schedules, make_schedule
from lightning_pipes.sim import simulate
from lightning_pipes.testing.generators import uniform

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
SETTINGS = {
    "kfkb": {"k": 2},
    "interleaved": {"stages_per_rank": 3},
    "hanayo": {"waves": 2},
    "ready": {"slack": 0},
    "deep": {"slack": 2},
}
DURATIONS = {"v": (12, 12, 12)}
"""The times of F, I and W of a process. The bubble of v has a formula only if they are equal."""
ENDLESS = {"pipedream", "pipedream_2bw", "dynpipe"}


def rows():
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.match(r"\[`(\w+)`\]", cells[0])
        if name:
            found[name[1]] = cells
    return found


def value(cell, **names):
    """Return the value of the first formula of a cell, in which `(p - 1)(f + b)` and `k (p - s)` are products."""
    formula = re.search(r"`([^`]+)`", cell)[1]
    formula = re.sub(r"(?<=\))\s*(?=\()|(?<=\b[a-z])\s+(?=\()|(?<=\d)\s+(?=\()", "*", formula)
    formula = re.sub(r"(?<=[\d)a-z])\s+(?=[a-z])", "*", formula)
    return eval(formula, {"min": min, "max": max, "ceil": ceil}, names)


def durations(name):
    return DURATIONS.get(name, (12, 24, 12))


def run(name, p, m, batches):
    f, b_i, b_w = durations(name)
    schedule = make_schedule(name, **SETTINGS.get(name, {}))
    where = schedule.place_stages(p)
    per_rank = len(where) // p
    plan, costs = uniform(
        len(where), m, f // per_rank, (b_i + b_w) // per_rank, w=b_w // per_rank, ranks=where, activation_bytes=1
    )
    plan: Plan = adapt_plan(plan, schedule)
    order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
    # A policy without flushes runs one batch, because in a stream all batches share its layers.
    one = 1 if order.is_endless else None
    return simulate(order, plan, costs, batches=batches if name in ENDLESS else one), per_rank


def names_of(name, p, m):
    chosen = SETTINGS.get(name, {})
    v, w, k = chosen.get("stages_per_rank"), chosen.get("waves"), chosen.get("k")
    n = chosen.get("slack")
    f, b_i, b_w = durations(name)
    return {"p": p, "m": m, "f": f, "b": b_i + b_w, "b_I": b_i, "b_W": b_w, "v": v, "w": w, "k": k, "n": n}


def test_has_every_schedule():
    ours = [n for n, entry in installed_schedules().items() if entry.value.startswith("lightning_pipes.strategies")]
    assert sorted(rows()) == sorted(ours)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", rows())
def test_formulas_are_true(name, p, m):
    _, settings, bubble, held, *_ = rows()[name]
    assert set(re.findall(r"`(\w+)`", settings)) >= set(SETTINGS.get(name, {}))
    batches = 4
    timeline, per_rank = run(name, p, m, batches)
    given = names_of(name, p, m)
    assert timeline.makespan - timeline.busy[0] == value(bubble, **given)
    if name in ENDLESS:  # the ramps cost the same for one batch as for several
        assert timeline.makespan - run(name, p, m, 1)[0].makespan == (batches - 1) * m * sum(durations(name))
    formula = "`min(p - s, m)`" if name == "ready" else held  # without slack
    for s, most in enumerate(timeline.peak_bytes):
        assert most / per_rank == pytest.approx(value(formula, s=s, **given)), f"process {s}"


def test_every_setting_is_named():
    for name, cells in rows().items():
        settings = {f.name for f in fields(installed_schedules()[name].load())}
        assert set(re.findall(r"`(\w+)`", cells[1])) == settings, name


def test_reads_products():
    assert value("`(p - 1)(f + b) / v` ¹", p=3, f=1, b=2, v=2) == 3
    assert value("`(2 (p - 1 - s) + (v - 1) p + 1) / v`", p=4, s=1, v=2) == 4.5
    assert value("`(p - 1) max(f, b) / w`", p=3, f=1, b=4, w=2) == 4
    assert value("at most `min(k (p - s), m)`", k=2, p=4, s=1, m=5) == 5
