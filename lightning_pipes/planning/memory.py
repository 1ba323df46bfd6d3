"""The memory that a plan needs, without simulation.

The order of the instructions on a rank determines the bytes that the rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Cluster, CostModel, Costs, ModelProfile
from lightning_pipes.ir import CostKey, Instruction, Kind, Plan, Program, add_recomputations, cost_classes, cost_key
from lightning_pipes.planning.partition import Seconds as Bytes
from lightning_pipes.planning.partition import range_sums

Array = npt.NDArray[np.float64]


def held_rows(program: Program, plan: Plan) -> tuple[int, ...]:
    """Return the most samples that each stage of a finite program holds between F and the end of B or W."""
    held, most = [0] * plan.n_stages, [0] * plan.n_stages
    for kind, stage, _, _, span in program.iter_instructions():
        if kind is Kind.F:
            held[stage] += span.rows
            if held[stage] > most[stage]:
                most[stage] = held[stage]
        elif kind is Kind.B or kind is Kind.W:
            held[stage] -= span.rows
    return tuple(most)


def peak_bytes(program: Program, plan: Plan, costs: CostModel) -> tuple[int, ...]:
    """Return the peak memory of each rank in bytes.

    The simulator finds the same values, and also when they occur.
    """
    rows = add_recomputations(program, plan).head
    return tuple(row_peak(row, rank, plan, costs) for rank, row in enumerate(rows))


def row_peak(row: Sequence[Instruction], rank: int, plan: Plan, costs: CostModel) -> int:
    """Return the peak memory in bytes of a rank that runs the computations of `row`, which include its R."""
    simple = all(
        cut.forward is cut.backward for cut in plan.jobs
    )  # the number of rows determines the bytes, which saves time for programs with many instructions
    now = most = costs.resident_bytes(rank, plan)
    known: dict[tuple[Kind, int, CostKey], tuple[int, int]] = {}
    for i in row:
        key = i.kind, i.stage, i.span.rows if simple else cost_key(i, plan)
        held = known.get(key)
        if held is None:
            held = known[key] = costs.memory_change(i, plan)
        now += held[0]
        if now > most:
            most = now
        now -= held[1]
    return most


def stage_peak(plan: Plan, costs: Costs, stage: int, held: int) -> int:
    """Return an upper bound of `peak_bytes` for the rank of `stage`, if the rank has no other stage.

    The stage is assumed to hold `held` of the largest micro-batches between F and the end of B, or of W, while it
    computes one of them.

    Args:
        plan: the plan.
        costs: the bytes of its stages.
        stage: the stage.
        held: the number of micro-batches that the stage holds.
    """
    forwards = [costs.memory_change(i, plan) for i, _ in cost_classes(Kind.F, stage, plan)]
    first, *others = plan.kinds_of_stage(stage)[1:]
    backwards = [costs.memory_change(i, plan) for kind in (first, *others) for i, _ in cost_classes(kind, stage, plan)]
    kept = max(taken - working for taken, working in forwards)
    if plan.split_backward:  # if activations are recomputed, they are kept for W
        kept += max(
            taken - freed
            for taken, freed in (costs.memory_change(i, plan) for i, _ in cost_classes(first, stage, plan))
        )
    needed = max(*(working for _, working in forwards), *(taken for taken, _ in backwards))
    return costs.resident_bytes(plan.ranks[stage], plan) + held * kept + needed


def cannot_fit(profile: ModelProfile, plan: Plan, cluster: Cluster, held: Sequence[int]) -> bool:
    """Return whether no partition can fit, because all ranks together have too little memory.

    The memory of all ranks is compared with the memory of the weights and of the activations, if every stage holds only
    the minimum of `held` rows. The result is False if the plan recomputes or if a rank has no limit.
    """
    memory = [device.memory for device in cluster.devices[: plan.n_ranks]]
    if plan.recompute or any(size is None for size in memory):
        return False
    needed = _fixed_bytes(profile, min(plan.versions)) + min(held) * profile.layer_arrays.layer_values("saved")
    return float(needed.sum()) > sum(size or 0 for size in memory)


def stage_bytes(profile: ModelProfile, plan: Plan, stage: int, held: int) -> Bytes:
    """Return a lower bound of the bytes of a stage that holds `held` rows.

    The result is a function of the first layer of the stage and of the layer after its last one. Working memory is not
    counted. The bound never decreases if layers are added at the end.
    """
    weights = range_sums(_fixed_bytes(profile, plan.versions[stage]))
    activations = range_sums(profile.layer_arrays.layer_values("saved"))
    if plan.recompute and plan.recompute[stage]:
        rows = max(span.rows for span in plan.spans(Kind.F, stage))
        inputs = np.array([profile.edge_bytes(cut) if cut else 0.0 for cut in range(len(profile.layers) + 1)])
        return lambda begin, stop: weights(begin, stop) + inputs[begin] * held + activations(begin, stop) * rows
    return lambda begin, stop: weights(begin, stop) + activations(begin, stop) * held


def _fixed_bytes(profile: ModelProfile, versions: int) -> Array:
    columns = profile.layer_arrays
    return (
        versions * columns.layer_values("weights")
        + columns.layer_values("gradients")
        + columns.layer_values("optimizer")
    )
