"""The decision about a run: schedule, micro-batches, recomputation and cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.cost.profile import LENGTH_COST_NOTE
from lightning_pipes.ir import Kind, Policy, Schedule, Span
from lightning_pipes.planning.balance import BalancedPlanner
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.planning.planner import BLOCKING, Planner, Problem, Recompute, Solution, planner_of
from lightning_pipes.sim import simulate
from lightning_pipes.trainer.cuts.piece import Piece
from lightning_pipes.trainer.data.length_cost import TOKENS_COST, LengthCost
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.reports.report import PredictedStep


@dataclass(frozen=True)
class Decision:
    """The decision about a run.

    Attributes:
        schedule: the schedule.
        microbatches: the number of micro-batches per batch, or None for the default of the schedule.
        recompute: the stages that recompute their forwards, as in `Problem.recompute`. It is `UNDECIDED` if the choice
            was requested and not possible; no stage recomputes then.
        ranks: the rank of each stage.
        layers: the layers of each stage.
        seconds: the predicted seconds of a step, or None if nothing was measured.
        computing: the part of these seconds before the optimizer steps, which is what a report measures.
        rows: the number of samples of the batch of this prediction.
        why: the reason for the decision, for messages. Empty if there was nothing to choose.
        table: the candidates that were compared, for messages.
        cut_reason: the reason why batches are cut in this way, for messages. Empty if the planner gives none.
        profile: the profile of the layers, if they were measured.
        deployment: devices, links and memory, if they were measured.
        movable: whether layers may move to other stages if the first steps contradict the profile.
        least: the smallest number of samples of a micro-batch that the module allows. The profile may have a larger
            one.
        pieces: the units that are cut, by the part that counts as a layer. Empty for layers, which `save_pieces` lists.
        stage_seconds: the seconds of F and B of one batch on each stage, if units were measured.
        late_recompute: whether stages recompute only when the gradient has arrived.
        kept_microbatches: the micro-batches that recomputing stages do not recompute, as in `Plan.kept_microbatches`.
    """

    schedule: Schedule | Policy
    microbatches: int | None
    recompute: Recompute
    ranks: tuple[int, ...]
    layers: tuple[Span, ...]
    seconds: float | None = None
    computing: float | None = None
    rows: int = 0
    why: str = ""
    table: str = ""
    cut_reason: str = ""
    profile: ModelProfile | None = None
    deployment: Deployment | None = None
    movable: bool = False
    least: int = 1
    pieces: tuple[Piece, ...] = ()
    stage_seconds: tuple[float, ...] = ()
    late_recompute: bool = False
    kept_microbatches: tuple[tuple[int, int], ...] = ()

    def save_pieces(self, path: str) -> None:
        """Write the layers or units of the stages to a file, for `lightning-pipes plan`."""
        placed = {n: stage for stage, span in enumerate(self.layers) for n in range(span.start, span.stop)}
        found: list[dict[str, Any]] = []
        for piece in self.pieces or self._list_layers(placed):
            values = {"stage": placed[piece.layer], **asdict(piece)}
            begins = bool(found) and found[-1]["stage"] != values["stage"]
            found.append({**values, "bytes": piece.bytes if begins else None})
        Path(path).write_text(json.dumps(found))

    def _list_layers(self, numbers: Iterable[int]) -> list[Piece]:
        if self.profile is None:
            return [Piece(n, str(n)) for n in numbers]
        profile, rows = self.profile, self.rows or self.profile.least_rows
        seconds = {n: sum(profile.seconds(kind, n, rows) for kind in (Kind.F, Kind.B)) for n in numbers}
        whole = sum(seconds.values()) or 1
        return [Piece(n, profile.layers[n].name, each, each / whole) for n, each in seconds.items()]

    @classmethod
    def from_solution(cls, solution: Solution, movable: bool) -> Decision:
        """Return the decision to use the schedule and the layers of a solution on the devices of its problem."""
        solved, plan = solution.problem, solution.plan
        return cls(
            solved.schedule,
            solved.microbatches,
            solved.recompute,
            plan.ranks,
            plan.layers,
            rows=solved.rows,
            why=solution.why,
            table=solution.table,
            profile=solved.profile,
            deployment=solved.deployment,
            movable=movable,
            least=solved.least,
            late_recompute=solved.late_recompute,
            kept_microbatches=solved.kept_microbatches,
        )

    def problem(self, rows: int = 1) -> Problem:
        """Return the planning problem for a batch of `rows` samples.

        All decisions that do not depend on the number of samples are part of the problem.
        """
        return Problem(
            self.schedule,
            max(self.ranks) + 1,
            rows,
            self.microbatches,
            self.recompute,
            self.layers,
            self.profile,
            self.deployment,
            least=self.least if self.profile is None else max(self.least, self.profile.least_rows),
            late_recompute=self.late_recompute,
            kept_microbatches=self.kept_microbatches,
        )

    def plans(
        self,
        replanner: Planner | None = None,
        tied: tuple[tuple[int, ...], ...] = (),
        relocation: str = BLOCKING,
        degrees: Sequence[int] = (),
    ) -> Plans:
        """Return the plans of the batches.

        Args:
            replanner: see `Plans`.
            tied: see `Problem`.
            relocation: see `Problem`.
            degrees: see `Plans`.
        """
        return Plans(replace(self.problem(), tied=tied, relocation=relocation), replanner, degrees)

    @property
    def length_cost(self) -> LengthCost:
        """The cost of sequences by their lengths, which is the number of tokens if it was not measured."""
        measured = None if self.profile is None else self.profile.notes.get(LENGTH_COST_NOTE)
        return TOKENS_COST if measured is None else LengthCost(*measured)

    def predicted(self, profile: ModelProfile) -> Decision:
        """Return the decision with the seconds that a profile predicts for its devices and its batch size."""
        made = replace(self, profile=profile)
        plan, order = made.plans().for_rows(self.rows)
        assert self.deployment is not None
        whole, computing = (
            evaluate_plan(p, order, plan, self.deployment).seconds for p in (profile, profile.without_steps())
        )
        cut = planner_of(self.schedule).explain_plan(made.problem(self.rows), plan)
        return replace(made, seconds=whole, computing=computing, cut_reason=cut)

    def predict_step(self) -> PredictedStep | None:
        """Return the simulated step with the length `computing`, or None if nothing was predicted."""
        if self.profile is None or self.deployment is None or self.computing is None:
            return None
        plan, order = self.plans().for_rows(self.rows)
        fit = evaluate_plan(self.profile.without_steps(), order, plan, self.deployment)
        timeline = simulate(fit.order, replace(plan, layers=()), fit.costs)
        return PredictedStep(replace(timeline, plan=plan, name="predicted"), order)

    def cut_anew(self, profile: ModelProfile) -> Decision:
        """Return the same decision with the cut for another profile, and with its predicted times.

        The cut only changes if this saves enough of a step.

        Raises:
            PlanError: no cut fits into the memory of the devices.
        """
        problem = replace(self, profile=profile).problem(self.rows)
        found = BalancedPlanner(planner_of(self.schedule)).solve(replace(problem, layers=(), fallback=self.layers))
        return replace(self, layers=found.plan.layers).predicted(profile)
