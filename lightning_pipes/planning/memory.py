"""The memory that a plan needs, without simulation.

The order of the instructions on a rank determines the bytes that the rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Cluster, CostModel, Costs, ModelProfile
from lightning_pipes.ir import CostKey, Instruction, Kind, Plan, Program, add_recomputations, cost_classes, cost_key
from lightning_pipes.planning.partition import Indices, range_sums
from lightning_pipes.planning.partition import Seconds as Bytes

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
    # The number of rows usually determines the bytes, which saves time for programs with many instructions.
    simple = not plan.kept_microbatches and all(cut.forward is cut.backward for cut in plan.jobs)
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

    The stage is assumed to hold `held` consecutive micro-batches, each as large as the largest one, between F and the
    end of B, or of W, while it computes one of them.

    Args:
        plan: the plan.
        costs: the bytes of its stages.
        stage: the stage.
        held: the number of micro-batches that the stage holds.
    """
    first, *_ = backwards = plan.kinds_of_stage(stage)[1:]
    changes = {
        kind: [
            (plan.recomputes(stage, 0, i.span), *costs.memory_change(i, plan))
            for i, _ in cost_classes(kind, stage, plan)
        ]
        for kind in (Kind.F, *backwards)
    }
    kept = {False: 0, True: 0}  # bytes of one held micro-batch, by whether it is recomputed
    for kind in (Kind.F, first)[: 1 + plan.split_backward]:  # recomputed activations are kept for W
        for again in kept:
            kept[again] += max((taken - freed for each, taken, freed in changes[kind] if each == again), default=0)
    forwards = [freed for _, _, freed in changes[Kind.F]]
    needed = max(*forwards, *(taken for kind in backwards for _, taken, _ in changes[kind]))
    return costs.resident_bytes(plan.ranks[stage], plan) + _most_kept(plan, stage, held, kept) + needed


def _most_kept(plan: Plan, stage: int, held: int, kept: Mapping[bool, int]) -> int:
    """Return the maximum bytes of `held` consecutive micro-batches, which may belong to two batches."""
    sizes = [kept[plan.recomputes(stage, 0, span)] for span in plan.spans(Kind.F, stage)]
    rounds, left = divmod(held, len(sizes))
    sums = [0, *accumulate(sizes + sizes)]
    return rounds * sums[len(sizes)] + max(sums[at + left] - sums[at] for at in range(len(sizes)))


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
    counted. The bound never decreases if layers are added at the end. If the stage recomputes, activations of one
    micro-batch exist at a time, in addition to those that `Plan.kept_microbatches` keeps.
    """
    weights = range_sums(_fixed_bytes(profile, plan.versions[stage]))
    activations = range_sums(profile.layer_arrays.layer_values("saved"))
    if plan.recompute and plan.recompute[stage]:
        rows = max(span.rows for span in plan.spans(Kind.F, stage))
        inputs = np.array([profile.edge_bytes(cut) if cut else 0.0 for cut in range(len(profile.layers) + 1)])
        if not plan.recomputes_all(stage):
            whole = _least_kept_rows(plan, stage, held)

            def size(begin: Indices, stop: Indices) -> Array:
                each, received = activations(begin, stop), inputs[begin]
                waiting = np.minimum(received, each) * held + np.maximum(each - received, 0.0) * whole
                return np.asarray(weights(begin, stop) + np.maximum(waiting, each * rows))

            return size
        return lambda begin, stop: weights(begin, stop) + inputs[begin] * held + activations(begin, stop) * rows
    return lambda begin, stop: weights(begin, stop) + activations(begin, stop) * held


def _least_kept_rows(plan: Plan, stage: int, held: int) -> int:
    """Return the minimum number of rows with activations among `held` rows of consecutive micro-batches."""
    kept, every = plan.kept_microbatches[stage]
    sizes = [span.rows for span in plan.spans(Kind.F, stage)]
    rounds, left = divmod(-(-held // max(sizes)), every)
    return (rounds * kept + max(0, left - (every - kept))) * min(sizes)


def _fixed_bytes(profile: ModelProfile, versions: int) -> Array:
    columns = profile.layer_arrays
    return (
        versions * columns.layer_values("weights")
        + columns.layer_values("gradients")
        + columns.layer_values("optimizer")
    )
