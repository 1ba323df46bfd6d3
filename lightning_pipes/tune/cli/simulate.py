"""The command `lightning-pipes simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from lightning_pipes.cost import Cluster, CostModel, ModelProfile, Table
from lightning_pipes.cost.units import bytes_text, parse_bytes, seconds_text
from lightning_pipes.ir import MAX_FORWARDS, InputError, Kind, Plan, Policy, Program, Schedule, verify
from lightning_pipes.planning.fit import (
    evaluate_plan,
    finite_orders,
    fit_layers,
    order_and_held_rows,
    step_bubble,
    step_seconds,
)
from lightning_pipes.planning.formatting import progress_bar, schedule_label, schedule_settings
from lightning_pipes.planning.partition import partition_at
from lightning_pipes.planning.planner import UNDECIDED, Problem, check_recompute, solve_plan
from lightning_pipes.planning.stage_recompute import choose_stages, fit_recomputed, with_stages
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.memory_use import held_samples
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.tune.cli.command import PICTURE_OPTIONS, Command, drawing_width, print_json
from lightning_pipes.tune.cli.pictures import write_pictures
from lightning_pipes.tune.cli.sources import (
    cluster_from_settings,
    parse_durations,
    parse_numbers,
    profile_from_settings,
    read_setting,
    schedule_from_settings,
)


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Simulate a schedule, and print its step time, bubble, memory and timeline."""
    schedule = schedule_from_settings(cfg)
    if schedule is None:
        raise InputError("simulate shows one schedule, as in schedule=1f1b; lightning-pipes plan chooses one")
    cluster, profile = cluster_from_settings(cfg, cfg.ranks), profile_from_settings(cfg)
    order, plan, costs = (
        _given(cfg, schedule, cluster) if profile is None else _profiled(cfg, schedule, profile, cluster)
    )
    costs = replace(costs, links={(a, b): cluster.link_between(a, b) for a, b, _ in plan.directed_links})
    timeline = replace(simulate(order, plan, costs), name="predicted")
    record = RunRecord(
        timeline,
        costs,
        schedule=schedule.name,
        settings=schedule_settings(schedule),
        profile=profile,
        memory=tuple(device.memory for device in cluster.devices[: plan.n_ranks]),
        facts={"model": profile.source} if profile else {},
    )
    with progress_bar("trying changes") as progress:
        advice = write_pictures(record, options, progress)
    verify(timeline.program(), plan)
    m = len(plan.spans(Kind.F, 0))
    held = [round(samples * m / plan.jobs[0].rows, 2) for samples in held_samples(timeline)]
    step, bubble = timeline.step / 1e9, sum(timeline.bubble) / len(timeline.bubble)
    if isinstance(order, Program) and order.is_endless:
        step, bubble = (of(order, replace(plan, layers=()), costs) for of in (step_seconds, step_bubble))
    found = {
        "schedule": schedule_label(schedule),
        "ranks": plan.n_ranks,
        "microbatches": m,
        "step_seconds": step,
        "bubble": bubble,
        "bubble_of_ranks": list(timeline.bubble),
        "efficiency": timeline.efficiency,
        "regime": timeline.regime,
        "peak_bytes": list(timeline.peak_bytes),
        "most_microbatches_held": held,
    }
    if options.json:
        print_json(found)
        return
    print(timeline.gantt(drawing_width()))
    print()
    print(f"{found['schedule']}: step {seconds_text(1e9 * step)}, bubble {bubble:.1%}, {timeline.regime}")
    print(f"micro-batches held by each rank: {', '.join(f'{each:g}' for each in held)}")
    if any(timeline.peak_bytes):
        print(f"peak memory of each rank: {', '.join(map(bytes_text, timeline.peak_bytes))}")
    for line in advice:
        print(line)


def _given(cfg: DictConfig, schedule: Schedule | Policy, cluster: Cluster) -> tuple[Program | Policy, Plan, CostModel]:
    """Return the order, the plan and the costs for times from the command line.

    The time of a rank is divided evenly among its stages.
    """
    (m,) = parse_numbers(cfg.microbatches, "microbatches", MAX_FORWARDS // cfg.ranks) or [8]
    again, late = check_recompute(cfg.recompute)
    plan = solve_plan(Problem(schedule, cfg.ranks, m, m, again, late_recompute=late))
    times = {
        Kind.F: parse_durations(cfg.forward, "forward", cfg.ranks),
        Kind.B: parse_durations(cfg.backward, "backward", cfg.ranks),
        Kind.STEP: parse_durations(cfg.step, "step", cfg.ranks),
    }
    times[Kind.I] = times[Kind.W] = [seconds / 2 for seconds in times[Kind.B]]
    seconds: dict[tuple[Kind, int], Table] = {
        (kind, s): ((0 if kind is Kind.STEP else 1, each[rank] / len(plan.stages[rank])),)
        for kind, each in times.items()
        for s, rank in enumerate(plan.ranks)
    }
    message, n = float(read_setting(cfg, "message", parse_bytes)), plan.n_stages
    held = [read_setting(cfg, "activations", parse_bytes) // len(plan.stages[rank]) for rank in plan.ranks]
    weights = [read_setting(cfg, "weights", parse_bytes) // len(plan.stages[rank]) for rank in plan.ranks]
    costs = CostModel(
        seconds,
        forward_bytes=(message,) * (n - 1),
        backward_bytes=(message,) * (n - 1),
        activation_bytes=tuple(held),
        weight_bytes=tuple(weights),
    )
    order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
    if again == UNDECIDED:
        limits = [device.memory for device in cluster.devices[: plan.n_ranks]]
        choice = choose_stages(finite_orders(order)[-1], plan, costs, limits)
        choice.check(plan, costs)
        plan = with_stages(plan, choice.stages, isinstance(schedule, Schedule), choice.kept_microbatches)
    return order, plan, costs


def _profiled(
    cfg: DictConfig, schedule: Schedule | Policy, profile: ModelProfile, cluster: Cluster
) -> tuple[Program | Policy, Plan, CostModel]:
    """Return the order, the plan and the costs for a profile.

    The layers are cut at the boundaries in `partition`, or at the best boundaries if it is not set.
    """
    (m,) = parse_numbers(cfg.microbatches, "microbatches", MAX_FORWARDS // cfg.ranks) or [8]
    again, late = check_recompute(cfg.recompute)
    problem = Problem(schedule, cfg.ranks, cfg.batch or m, m, again, late_recompute=late)
    plan = solve_plan(problem)
    cluster = replace(cluster, devices=cluster.devices[: cfg.ranks])
    if cfg.partition is not None:
        plan = replace(plan, layers=partition_at(list(cfg.partition), len(profile.layers), plan.n_stages))
    if again == UNDECIDED:
        fit = fit_recomputed(profile, schedule, plan, cluster)
    elif cfg.partition is None:
        fit = fit_layers(profile, schedule, plan, cluster)
    else:
        fit = evaluate_plan(profile, order_and_held_rows(schedule, plan)[0], plan, cluster)
    return fit.order, fit.plan, fit.costs


COMMAND = Command(
    "simulate",
    "Runs a schedule in virtual time: with times from the command line, or of a profile.",
    [
        "lightning-pipes simulate schedule=1f1b ranks=4 microbatches=8 forward=10ms backward=20ms",
        "lightning-pipes simulate schedule=kfkb schedule.k=2 forward=[9ms,9ms,14ms,9ms] bandwidth=1Gbit/s message=4MiB",
        "lightning-pipes simulate schedule=interleaved profile=profile.json ranks=2 batch=32 --html timeline.html",
        "lightning-pipes simulate schedule=gpipe model=GPT-2-345M device=A100-40G ranks=8 batch=64 cluster=dgx_a100",
    ],
    run,
    config="simulate",
    flags=PICTURE_OPTIONS,
    defaults=frozenset({"cluster=null"}),
)
