"""The schedule "pipedream": 1F1B that never flushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import (
    STEP,
    B,
    F,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    Schedule,
    check_fields,
    check_one_stage_a_rank,
)
from lightning_pipes.ir.program import Row


@dataclass(frozen=True)
class PipeDream(Schedule):
    """Asynchronous 1F1B with weight stashing (Narayanan et al. 2019, SOSP, S3.2 and S3.3).

    The next batch enters while earlier batches are still on their way back, so that no rank idles once the pipeline is
    full. With one micro-batch per batch, as in the paper, a batch reads weights on stage s of p that lack the last p -
    1 - s updates, and its backward uses the same weights as its forward. Each stage keeps p - s versions of the
    weights. With m micro-batches per batch, all of them read the weights that the first one has read. The batch then
    misses only ceil((p - 1 - s) / m) updates, and the stage keeps one version more than this number.

    Attributes:
        predict: whether a batch reads predicted weights W - s lr v instead of W. The momentum v of the optimizer
            extrapolates the weights over the s updates that the batch would miss without the prediction (SpecTrain,
            Chen et al. 2018, arXiv:1809.02839; with Adam as in XPipe, Guan et al. 2019, arXiv:1911.04610).

    Raises:
        PlanError: a rank has several stages, spans differ between stages or directions, the backward is split, or the
            plan has several jobs.
    """

    predict: bool = False
    name: ClassVar[str] = "pipedream"
    flushes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def predicts_weights(self) -> bool:
        return self.predict

    def weight_versions(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of weight versions that each stage keeps."""
        m = len(plan.spans(Kind.F, 0))
        return tuple(1 - (-(plan.n_stages - 1 - s) // m) for s in range(plan.n_stages))

    def program(self, plan: Plan) -> Program:
        return endless_1f1b(plan, self.name)


def endless_1f1b(plan: Plan, name: str, late_steps: bool = False) -> Program:
    """Return the endless program of 1F1B over the micro-batches of all batches.

    Args:
        plan: the plan of one batch.
        name: the name of the schedule, used in error messages.
        late_steps: whether the STEP of the last stage waits for the first forward of the next batch, which then still
            reads the old weights. By default, a STEP follows the last backward of its batch.

    Raises:
        PlanError: the plan has several jobs, several stages on a rank, a split backward, or different spans between
            stages or directions.
    """
    if len(plan.jobs) > 1 or plan.split_backward:
        raise PlanError(
            f"{name} orders the batches of one job with full backwards (B); the plan has {len(plan.jobs)} jobs and "
            f"split_backward={plan.split_backward}"
        )
    check_one_stage_a_rank(plan, name)
    spans = plan.spans(Kind.F, 0)
    if any(plan.spans(Kind.F, s) != spans for s in range(plan.n_stages)):
        raise PlanError(f"{name} needs the same spans on all stages")
    rows = [_Row(plan, stage, late_steps) for (stage,) in plan.stages]
    begun = max(1, -(-(plan.n_stages - 1) // len(spans))) * len(spans)  # complete batches that fill the pipeline
    return Program(
        tuple(row.add_part(-row.ahead, begun - row.ahead) for row in rows),
        tuple(row.add_part(begun - row.ahead, begun - row.ahead + len(spans)) for row in rows),
        tuple(row.add_part(begun - row.ahead, begun, forward=False) for row in rows),
    )


class _Row:
    """The row of one stage, as a sequence of turns.

    A turn is the forward of micro-batch n + ahead, followed by the backward of micro-batch n. Micro-batches are counted
    over all batches.
    """

    def __init__(self, plan: Plan, stage: int, late_steps: bool) -> None:
        self.ahead = plan.n_stages - 1 - stage
        self._stage = stage
        self._spans = plan.spans(Kind.F, stage)
        self._late_step = late_steps and not self.ahead  # on other stages, the next batch has already begun

    # Drawn by `step(PipeDream(), microbatches=1, batches=5)`:
    # rank 0 |0-1-2-........0===3-1===4-2===..3===..4===| bubble 28.6%
    # rank 1 |..0-1-....0===2-1===3-2===4-3===..4===....| bubble 28.6%
    # rank 2 |....0-0===1-1===2-2===3-3===4-4===........| bubble 28.6%
    #         - forward  = backward  . idle
    def add_part(self, start: int, stop: int, forward: bool = True) -> Row:
        """Return the turns from `start` to `stop`.

        Without `forward`, only their backwards are returned, followed by the last STEP.
        """
        row: list[Instruction] = []
        m, s = len(self._spans), self._stage
        for n in range(start, stop):
            batch, k = divmod(n, m)
            if forward:
                f_batch, f_k = divmod(n + self.ahead, m)
                row.append(F(s, self._spans[f_k], batch=f_batch))
                if self._late_step and f_k == 0 and f_batch:
                    row.append(STEP(s, batch=f_batch - 1))
            if n >= 0:
                row.append(B(s, self._spans[k], batch=batch))
                if k == m - 1 and not self._late_step:
                    row.append(STEP(s, batch=batch))
        if not forward and self._late_step:
            row.append(STEP(s, batch=stop // m - 1))
        return tuple(row)
