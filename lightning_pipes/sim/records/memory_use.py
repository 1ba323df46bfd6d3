"""The peak memory of each rank, and estimates of the memory of other ways to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_pipes.cost import CostModel, Costs
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import Kind, Plan
from lightning_pipes.sim.timeline import Timeline


class Alternatives(NamedTuple):
    """The estimated memory of a process that trains on the same batch in another way. Only tensors are counted.

    Attributes:
        one_process: the bytes of weights, gradients, optimizer states, and the activations of the whole batch.
        ddp: the bytes if the batch is distributed over as many DDP processes as the pipeline has ranks, including a
            copy of the gradients.
    """

    one_process: int
    ddp: int


def estimate_alternatives(plan: Plan, costs: CostModel) -> Alternatives | None:
    """Return estimates from the bytes of all stages, or None if these are unknown."""
    if not costs.weight_bytes or not costs.activation_bytes:
        return None
    weights = sum(costs.weight_bytes)
    held, of_sample = weights + sum(costs.state_bytes), sum(costs.activation_bytes)
    rows = plan.jobs[0].rows
    return Alternatives(held + of_sample * rows, held + weights + of_sample * -(-rows // plan.n_ranks))


def describe_peaks(
    estimated: Sequence[int], measured: Sequence[int | None], others: Alternatives | None, resident: bool
) -> str:
    """Return sentences on the peak memory of each rank, without the last full stop; empty if nothing is known.

    Estimates count only tensors and are compared with other estimates. The resident memory of a process also includes
    memory of libraries and of the allocator, so it is reported in a separate sentence.

    Args:
        estimated: the bytes of the tensors of each rank, or empty.
        measured: the measured bytes of each rank, or empty.
        others: the memory of other ways to train on the same batch.
        resident: whether `measured` is the resident memory of processes instead of the memory that a GPU's allocator
            has allocated.
    """
    sentences = []
    if any(estimated):
        sentences.append(f"Estimated peak memory of tensors: {_by_rank(estimated)}")
        if others is not None and len(estimated) > 1:
            sentences.append(
                f"For the same batch, the estimate is {bytes_text(others.one_process)} for one process, and "
                f"{bytes_text(others.ddp)} for each process of DDP"
            )
    if any(size is not None for size in measured):
        what = "Resident memory of the processes, excluding imports" if resident else "Peak memory allocated on GPUs"
        sentences.append(f"{what}: {_by_rank(measured)}")
    return ". ".join(sentences)


def _by_rank(sizes: Sequence[int | None]) -> str:
    return ", ".join(f"{bytes_text(size)} on rank {rank}" for rank, size in enumerate(sizes) if size is not None)


Curve = tuple[tuple[int, int], ...]
"""Pairs of a time in nanoseconds and the bytes held from this time on, in ascending order of time."""


def memory_curves(timeline: Timeline, costs: Costs) -> tuple[Curve, ...]:
    """Return the bytes that each rank holds over time, according to `costs`.

    They consist of the bytes that the rank always holds and of the bytes that every computation allocates when it
    starts and frees when it ends. Memory that `costs` does not contain is not counted.
    """
    found = []
    for rank in range(timeline.plan.n_ranks):
        held = costs.resident_bytes(rank, timeline.plan)
        curve = [(0, held)]
        for e in timeline.computations:  # the computations of a rank do not overlap
            if e.rank != rank:
                continue
            taken, freed = costs.memory_change(e.instruction, timeline.plan)
            for time, change in ((e.start, taken), (e.end, -freed)):
                held += change
                if change and time == curve[-1][0]:
                    curve[-1] = (time, held)
                elif change:
                    curve.append((time, held))
        found.append(tuple(curve))
    return tuple(found)


def held_samples(timeline: Timeline) -> tuple[float, ...]:
    """Return the most samples that each rank holds between the start of their forward and the end of their backward.

    The stages of a rank count as equal parts of the rank. A sample on one of two stages counts as half of a sample.
    """
    plan = timeline.plan
    held, most = [0] * plan.n_ranks, [0] * plan.n_ranks
    for e in timeline.computations:  # the computations of a rank do not overlap
        rows = e.instruction.span.rows
        if e.instruction.kind is Kind.F:
            held[e.rank] += rows
            most[e.rank] = max(most[e.rank], held[e.rank])
        elif e.instruction.kind in (Kind.B, Kind.W):
            held[e.rank] -= rows
    return tuple(rows / len(stages) for rows, stages in zip(most, plan.stages, strict=True))
