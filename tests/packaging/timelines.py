"""The timelines in comments: `# Drawn by `call`:` and below it the result of the call.

The calls are functions of this module. A comment above the order of a schedule may use all names of its own module.
"""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import lightning_pipes
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, LayerUse, Plan, Schedule, Span, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.jap import Effort, Job, problem_from_plan, solve_array, stream_jobs
from lightning_pipes.strategies.jap.rounds import program_from_order
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.ready import Ready
from lightning_pipes.testing.generators import uniform

ROOT = Path(lightning_pipes.__file__).resolve().parent.parent
_CALL = re.compile(r"^( *)# Drawn by `(.+)`:$")


@dataclass(frozen=True)
class Drawing:
    """A timeline in a comment: its position, its call, its text, and the name of the definition below it."""

    path: Path
    line: int
    call: str
    shown: str
    below: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    def anew(self) -> str:
        """Return the timeline that the call draws now."""
        name = ".".join(self.path.relative_to(ROOT).with_suffix("").parts)
        name = name if name.startswith("lightning_pipes") else f"lightning_pipes.{name}"
        return eval(self.call, {**CALLS, **vars(importlib.import_module(name))})


def drawings(path: Path) -> list[Drawing]:
    """Return the timelines of a source file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for at, line in enumerate(lines):
        match = _CALL.match(line)
        if match is None:
            continue
        indent, call = match.groups()
        end = at + 1
        while end < len(lines) and lines[end].startswith(f"{indent}#"):
            end += 1
        shown = "\n".join(each[len(indent) + 2 :] for each in lines[at + 1 : end])
        below = next((each.split("(")[0].split()[-1] for each in lines[end:] if "def " in each), "")
        found.append(Drawing(path, at + 1, call, shown, below))
    return found


def step(order, ranks=3, microbatches=4, f=1, b=2, link=0, batches=None, scale=2, **more):
    """Draw a window of equal stages with times in nanoseconds, each `scale` characters wide."""
    placement = order.place_stages(ranks) if isinstance(order, Schedule) else tuple(range(ranks))
    plan, costs = uniform(len(placement), microbatches, f, b, link=link, ranks=placement, **more)
    plan = adapt_plan(plan, order)
    return _drawn(order.program(plan) if isinstance(order, Schedule) else order, plan, costs, batches, scale)


def unequal(name):
    """Draw a batch of 8 samples that the stages cut differently.

    The forwards have 2, 4 and 8 micro-batches on the three stages, and the backwards 4, 4 and 8.
    """
    order = make_schedule(name, forward=(2, 4, 8), backward=(4, 4, 8))
    plan = solve_plan(Problem(order, 3, 8))
    costs = CostModel.uniform(3, 1e-9, 2e-9, rows=1)
    return _drawn(order.program(plan) if isinstance(order, Schedule) else order, plan, costs, None, 1)


def subnets(order, *chosen, microbatches=1, scale=2):
    """Draw batches that choose a layer of each stage, by a digit for each stage."""
    plan, costs = uniform(len(chosen[0]), microbatches, 1, 2)
    blocks = tuple(Span(s, s + 1) for s in range(plan.n_stages))
    uses = [LayerUse.from_names([f"{s}.{c}" for s, c in enumerate(each)], blocks) for each in chosen]
    return _drawn(order, plan, costs, uses, scale)


def jobs(order, rows=(2, 1, 1), stages=3, batches=2, scale=2):
    """Draw batches of several jobs that take one nanosecond per sample forward and two backward."""
    plan = Plan(tuple(range(stages)), tuple(Cut.even(each, 1, stages) for each in rows), batches=batches)
    return _drawn(order.program(plan), plan, CostModel.uniform(stages, 1e-9, 2e-9, rows=1), None, scale)


def iteration(method, rows=(2, 1, 1), stages=3, scale=2, orders=300):
    """Draw one batch of each of several jobs in the order of a solver."""
    plan = Plan(tuple(range(stages)), tuple(Cut.even(each, 1, stages) for each in rows))
    costs = CostModel.uniform(stages, 1e-9, 2e-9, rows=1)
    best = solve_array(problem_from_plan(plan, costs), method, Effort(orders))
    return _drawn(program_from_order(best.order, plan), plan, costs, None, scale)


def joining(batches=(2, 1, 1), resident=2, stages=3, scale=2):
    """Draw the jobs of a stream with fewer resident jobs than jobs in all."""
    costs = CostModel.uniform(stages, 1e-9, 2e-9, rows=1)
    found = stream_jobs([Job(Cut.even(1, 1, stages), count) for count in batches], costs, resident)
    return _drawn(found.program, found.plan, costs, None, scale)


def _drawn(order, plan, costs, batches, scale):
    timeline = simulate(order, plan, costs, batches=batches)
    return "\n".join(line.rstrip() for line in timeline.gantt(scale * timeline.makespan).splitlines()[1:])


CALLS = {
    "step": step,
    "unequal": unequal,
    "subnets": subnets,
    "jobs": jobs,
    "iteration": iteration,
    "joining": joining,
    "OneFOneB": OneFOneB,
    "Ready": Ready,
}
