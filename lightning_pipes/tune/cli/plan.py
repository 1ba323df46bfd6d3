"""The command `lightning-pipes plan`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_pipes.cost import Cluster, Deployment, ModelProfile
from lightning_pipes.cost.units import bytes_text, seconds_text
from lightning_pipes.ir import MAX_FORWARDS, InputError, PipelineError, Policy, Schedule, check_count
from lightning_pipes.planning.advice import Advice, Change
from lightning_pipes.planning.auto import Choice, Option, choose_option
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.planning.formatting import (
    hydra_overrides,
    progress_bar,
    schedule_label,
    schedule_settings,
    strategy_arguments,
    strategy_line,
)
from lightning_pipes.planning.planner import UNDECIDED, check_recompute
from lightning_pipes.planning.staleness import Iterations
from lightning_pipes.sim import Timeline, simulate
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.records.memory_use import held_samples
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.tune.cli.command import PICTURE_OPTIONS, Command, drawing_width, format_table, print_json
from lightning_pipes.tune.cli.pictures import write_pictures
from lightning_pipes.tune.cli.sources import (
    cluster_from_settings,
    parse_numbers,
    require_profile,
    schedule_from_settings,
)

_MAX_TABLE_LINES = 40


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Choose a plan and print it, or draw the plan of a script."""
    if words:
        _plan_script(words[0], options)
        return
    profile = require_profile(cfg, "plan")
    if cfg.ranks > len(profile.layers):
        raise InputError(f"ranks={cfg.ranks}: the model has {len(profile.layers)} layers, but each rank needs one")
    check_count("batch", cfg.batch, "; samples")
    deployment = Deployment.from_cluster(cluster_from_settings(cfg, cfg.ranks * cfg.replicas), cfg.ranks, cfg.replicas)
    schedule = schedule_from_settings(cfg)
    again, late = check_recompute(UNDECIDED if cfg.recompute is None else cfg.recompute)
    with progress_bar("plan") as progress:
        choice = choose_option(
            profile,
            cfg.ranks,
            cfg.batch,
            deployment,
            schedules=None if schedule is None else [schedule],
            microbatches=parse_numbers(cfg.microbatches, "microbatches", MAX_FORWARDS // cfg.ranks),
            recompute=(False, UNDECIDED) if again == UNDECIDED else (again,),
            late_recompute=late,
            progress=progress,
            iterations=_iterations(cfg, schedule),
        )
    alone = evaluate_plan(profile, choice.fit.order, choice.fit.plan, deployment.pipeline)
    reduce = choice.fit.seconds - alone.seconds
    timeline = replace(simulate(alone.order, alone.plan, alone.costs), name="predicted")
    arguments = strategy_arguments(choice.best.schedule, choice.fit.plan)
    arguments |= {"data_parallel": cfg.replicas} if cfg.replicas > 1 else {}
    sentence = _sentence(choice, timeline, cfg, reduce)
    record = _record(choice, timeline, profile, deployment.pipeline)
    with progress_bar("draw") as progress:
        advice = _advice(choice, sentence, arguments, timeline) if options.html else None  # simulates its options
        lines = write_pictures(record, options, progress, advice)
    if options.json:
        print_json(_to_json(choice, timeline, profile, arguments, reduce, cfg))
        return
    print(f"{choice}\n")
    print(f"{format_table(_stages(choice, profile, timeline))}\n")
    print(f"{timeline.gantt(drawing_width())}\n")
    print(f"{sentence}\n")
    print(f"    {strategy_line(arguments)}")
    print(f"    {hydra_overrides(arguments)}")
    for line in lines:
        print(line)


def _iterations(cfg: DictConfig, schedule: Schedule | Policy | None) -> Iterations | None:
    """Return T(S) according to the setting `stale_gradients`, or None if only exact gradients are allowed.

    Raises:
        InputError: the setting is invalid, or a schedule is also set.
    """
    given = cfg.stale_gradients
    setting = OmegaConf.to_container(given) if isinstance(given, DictConfig) else given
    found = Iterations.from_setting("stale_gradients", setting)  # type: ignore[arg-type]  # checked there
    if found is not None and schedule is not None:
        raise InputError(
            f"stale_gradients={setting} is for schedule=auto, but schedule={schedule.name} is set; remove one of them"
        )
    return found


def _plan_script(script: str, options: argparse.Namespace) -> None:
    """Run a script until its module is cut, and print the layers or units of each stage.

    Raises:
        InputError: there is no such script, or settings are also given.
        PipelineError: the script did not cut a module.
    """
    from lightning_pipes.trainer.plan.settings import PLAN_VARIABLE  # a slow import

    given = [word for word in options.settings if "=" in word] + [
        flag for flag in ("png", "html") if options.__dict__[flag]
    ]
    if given:
        raise InputError(f"{given[0]} is for a plan from a profile; {script} sets its own model, data and devices")
    if not Path(script).is_file():
        raise InputError(f"{script}: there is no such script")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pieces.json"
        env = os.environ | {PLAN_VARIABLE: str(file)}
        status = subprocess.run([sys.executable, script, *options.arguments], env=env).returncode
        if not file.exists():
            raise PipelineError(
                f"{script} did not cut a module (it ended with status {status}); call fit of a "
                "Trainer(strategy=PipelineStrategy(...)) in it"
            )
        pieces = json.loads(file.read_text())
    if options.json:
        print_json({"stages": max(piece["stage"] for piece in pieces) + 1, "pieces": pieces})
    else:
        print(f"\n{format_table(_draw_pieces(pieces))}")


def _draw_pieces(pieces: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the lines of a table of layers or units, with a line at each border between stages."""
    deepest = max(piece["name"].count(".") for piece in pieces) + 1
    depth = next((d for d in range(deepest, 1, -1) if len(_group_pieces(pieces, d)) <= _MAX_TABLE_LINES), 1)
    groups = _group_pieces(pieces, depth)
    largest = max(sum(piece["share"] or 0 for piece in group) for group in groups)
    lines: list[dict[str, str]] = []
    number = 0
    for group in groups:
        first, share = group[0], sum(piece["share"] or 0 for piece in group)
        if number and first["stage"] != int(lines[-1]["stage"]):
            crossing = "" if first["bytes"] is None else f" {bytes_text(first['bytes'])} cross "
            lines.append({"stage": "", "units": "", "name": f"----{crossing}----"})
        known = all(piece["seconds"] is not None for piece in group)
        lines.append(
            {
                "stage": str(first["stage"]),
                "units": str(number) if len(group) == 1 else f"{number}-{number + len(group) - 1}",
                "name": first["name"] if len(group) == 1 else ".".join(first["name"].split(".")[:depth]) + "...",
                "time": seconds_text(1e9 * sum(piece["seconds"] for piece in group)) if known else "",
                "share": "" if first["share"] is None else f"{share:.1%}",
                "": "#" * round(24 * share / largest) if largest else "",
            }
        )
        number += len(group)
    return lines


def _group_pieces(pieces: Sequence[Mapping[str, Any]], depth: int) -> list[list[Mapping[str, Any]]]:
    """Return groups of consecutive pieces that have the same stage and the same first `depth` names in their paths."""
    return [list(found) for _, found in groupby(pieces, lambda p: (p["stage"], p["name"].split(".")[:depth]))]


def _sentence(choice: Choice, timeline: Timeline, cfg: DictConfig, reduce: float) -> str:
    fit = choice.fit
    bubble = fit.bubble
    again = choice.best.recomputation_text
    peak = f", at most {bytes_text(max(fit.peak_bytes))} a device" if max(fit.peak_bytes) else ""
    step = seconds_text(1e9 * fit.seconds)
    if cfg.replicas > 1:
        step += f", of which {seconds_text(1e9 * reduce)} to sum gradients over replicas"
    rate = cfg.batch * cfg.replicas / fit.seconds
    return (
        f"{schedule_label(choice.best.schedule)} with {choice.best.microbatches} micro-batches{again}: a step takes "
        f"{step}, {rate:.3g} samples/s, bubble {bubble:.1%}{peak}. Simulated with {timeline.regime}."
    )


def _stages(choice: Choice, profile: ModelProfile, timeline: Timeline) -> list[dict[str, Any]]:
    plan, by_stage = choice.fit.plan, BottleneckRank.from_timeline(timeline).by_stage
    rows = []
    for stage, span in enumerate(plan.layers):
        names = [layer.name for layer in profile.layers[span.start : span.stop]]
        rows.append(
            {
                "stage": stage,
                "rank": plan.ranks[stage],
                "layers": f"{span.start}-{span.stop - 1}" if span.rows > 1 else str(span.start),
                "names": ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ... {names[-1]}",
                "computes": seconds_text(1e9 * by_stage[stage]),
                "peak memory": bytes_text(choice.fit.peak_bytes[plan.ranks[stage]]),
            }
        )
    return rows


def _to_json(
    choice: Choice, timeline: Timeline, profile: ModelProfile, arguments: dict[str, Any], reduce: float, cfg: DictConfig
) -> dict[str, Any]:
    fit = choice.fit
    return {
        "schedule": choice.best.schedule.name,
        "settings": schedule_settings(choice.best.schedule),
        "microbatches": choice.best.microbatches,
        "recompute": [*again] if isinstance(again := choice.best.recompute, tuple) else again,
        "partition": fit.cuts,
        "layers": [[layer.name for layer in profile.layers[slice(*span)]] for span in fit.plan.layers],
        "step_seconds": fit.seconds,
        "pipeline_seconds": fit.seconds - reduce,
        "all_reduce_seconds": reduce,
        "samples_per_second": cfg.batch * cfg.replicas / fit.seconds,
        "bubble": fit.bubble,
        "regime": timeline.regime,
        "peak_bytes": list(fit.peak_bytes),
        "strategy": strategy_line(arguments),
        "overrides": hydra_overrides(arguments),
        "options": choice.rows(len(choice.options)),
        "not_searched": list(choice.not_searched),
    }


def _record(choice: Choice, timeline: Timeline, profile: ModelProfile, cluster: Cluster) -> RunRecord:
    schedule = choice.best.schedule
    return RunRecord(
        timeline,
        choice.fit.costs,
        schedule=schedule.name,
        settings=schedule_settings(schedule),
        profile=profile,
        memory=tuple(device.memory for device in cluster.devices),
        facts={"model": profile.source, "device": profile.device},
    )


def _advice(choice: Choice, sentence: str, arguments: dict[str, Any], timeline: Timeline) -> Advice:
    """Return the choice in the form that the page displays."""
    best = _change(choice.best, timeline)
    fitting = [option for option in choice.options if option.fit is not None and option is not choice.best]
    others = tuple(_change(option) for option in fitting[:8])
    proposed = replace(best, arguments=arguments)
    return Advice(sentence, proposed, replace(best, what="the choice"), others)


def _change(option: Option, run: Timeline | None = None) -> Change:
    fit = option.fit
    assert fit is not None
    run = run or simulate(fit.order, fit.plan, fit.costs)
    return Change(
        f"{schedule_label(option.schedule)}, {option.microbatches} micro-batches{option.recomputation_text}",
        strategy_arguments(option.schedule, fit.plan),
        fit.seconds,
        fit.bubble,
        max(held_samples(run)),
        max(fit.peak_bytes),
    )


COMMAND = Command(
    "plan",
    "Chooses schedule, micro-batches, recomputation and partition for a model on a cluster, within its memory, "
    "by\nsimulating the options that might be fastest.\n\nWith a SCRIPT that trains with a PipelineStrategy: draws "
    "the layers that it cuts, or the units of a module without\na container of layers, their times, and the borders "
    "that the training has chosen. It ends before its first batch.",
    [
        "lightning-pipes plan profile=profile.json ranks=4 batch=64",
        "lightning-pipes plan model=GPT-2-345M device=A100-40G ranks=8 batch=64 schedule=auto memory=16GiB",
        "lightning-pipes plan model=GPT-2-1.5B ranks=16 batch=128 cluster=dgx_a100 replicas=4 --html plan.html",
        "lightning-pipes plan profile=profile.json ranks=4 batch=64 schedule=kfkb schedule.k=4 microbatches=[8,16]",
        "lightning-pipes plan profile=profile.json ranks=4 batch=64 'stale_gradients={1: 196, 4: 222}'",
        "lightning-pipes plan train.py --lr 0.1",
    ],
    run,
    config="plan",
    positionals=("SCRIPT",),
    optional=True,
    script=True,
    flags=PICTURE_OPTIONS,
    defaults=frozenset({"schedule=auto", "schedule=null", "cluster=null"}),
)
