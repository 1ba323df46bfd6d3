"""Memory and step time of schedules: 1F1B, interleaved, zero bubble and v, compared with torch's ScheduleZBVZeroBubble.

A half-stage is one micro-batch on half of the layers of a rank, between its forward and its weight gradients. The first
rank of 1F1B holds 2 p half-stages. V-Min, V-Half and ZB-V are `v` with k = p, p + 2 and 2 p.

Keys end with the number of ranks. `v_half_memory` and `v_half_step` are those on 8 ranks, and `zbv_vs_torch` and
`v_simulation_error` are the larger ones.

- *table*: simulated steps and held half-stages on 4 and on 8 ranks, for equal stages, links that take no time, and F, I
  and W of equal length.
- *memory*: the tensors that the largest rank holds in a step, in bytes, on 4 and on 8 ranks. The model consists of 16
  equal transformer blocks, so that all stages are equal.
- *steps*: executed steps of all schedules and of torch's schedule, which take turns in the same processes. The stages
  sleep 10 ms for each of F, I and W of a rank, so that two cores can stand for eight devices. They are valid for order,
  transport and overhead, but not for anything else. *predicted* is the simulated step with the additional time of the
  engine, which is measured on 1F1B and ZB-H1 with 6 micro-batches.
- *recompute*: executed steps of 1F1B on 4 ranks in which all stages but the last one recompute, with stages as in
  *steps*. `recompute_gain` is the step if stages recompute when the gradient has arrived, divided by the step if they
  recompute while it is on its way.
- *gpt*: executed steps of ZB-V and of torch's schedule on a real GPT in four stages, on two ranks of one thread each.
- *tokens*: executed steps of 1F1B with micro-batches of equal numbers of tokens, compared with equal numbers of
  samples; see benchmarks/tokens.py.

Our engine sends through shared memory on one host, and torch sends through gloo. Keys with `_gloo` are for our engine
on gloo.

    python benchmarks/schedules.py [--quick] [--json] [--only NAME]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.engine import LEARNING, WARM_UP, Cell, make_ours, make_torch
from benchmarks.fidelity import Overheads
from benchmarks.harness.emulated import EmulatedStep, join_ranks, step_seconds
from benchmarks.harness.memory import TensorBytes, count_tensor_bytes
from benchmarks.harness.report import Report, make_parser, run_command
from benchmarks.harness.timing import MAX_SPREAD, explain_noise, measure_load, relative_spread
from benchmarks.tokens import compare_tokens
from lightning_pipes.engine import Engine
from lightning_pipes.ir import Kind
from lightning_pipes.ir.clock import read_nanoseconds
from lightning_pipes.sim import simulate
from lightning_pipes.sim.timeline import Event
from lightning_pipes.strategies.v import V
from lightning_pipes.testing.ranks import run_ranks

SCALE = 2.0
"""The factor of the times of emulated stages, with which F, I and W of a rank take 10 ms each."""
ROUNDS, QUICK_ROUNDS, LEARNING_STEPS = 15, 4, 3
V_KEYS = {"v_min": "V-Min", "v_half": "V-Half"}
"""The first part of the names of keys, and the schedule."""
PEER, GLOO = "torch ZB-V", "ZB-V, gloo"


def make_cells(ranks: int, model: str = "emulated", quick: bool = False) -> dict[str, Cell]:
    """Return one training for each schedule, by its name. All of them train the same model with 2 p micro-batches.

    Args:
        ranks: the number p of ranks.
        model: the model, see `Cell`.
        quick: whether to return only 1F1B and the schedules "v" that the headline numbers need.
    """
    base = Cell("1f1b", ranks, 2 * ranks, model, separable=True, scale=SCALE)
    held = {k: f"v k={k}" for k in (V.least_held(ranks), 3 * ranks // 2)}
    held |= {ranks: "V-Min", ranks + 2: "V-Half", 2 * ranks: "ZB-V"}
    cells = {
        "1F1B": base,
        "interleaved": replace(base, schedule="interleaved"),
        "ZB-H1": replace(base, schedule="zero_bubble"),
        "ZB-H2": replace(base, schedule="zero_bubble", settings=(("extra", (1,) * (ranks - 1)),)),
        **{name: replace(base, schedule="v", settings=(("k", k),)) for k, name in sorted(held.items())},
    }
    return {name: cells[name] for name in ("1F1B", "V-Min", "V-Half", "ZB-V")} if quick else cells


def count_held(rows: Iterable[Iterable[str]], halves: int) -> int:
    """Return the number of half-stages that the largest rank holds.

    Args:
        rows: the kinds of the computations of each rank, in order.
        halves: the number of half-stages in a stage.
    """
    most = 0
    for row in rows:
        held = 0
        for kind in row:
            held += halves * ((kind == Kind.F) - (kind in (Kind.B, Kind.W)))
            most = max(most, held)
    return most


def count_held_by(cell: Cell) -> int:
    """Return the number of half-stages that the largest rank holds in a training."""
    program = cell.made_schedule.program(cell.plan)
    return count_held(([i.kind for i in row] for row in program.head), 2 // cell.stages_per_rank)


def simulate_seconds(cell: Cell, overheads: Overheads | None = None) -> float:
    """Return the seconds of a simulated step, with the additional time of the engine or without it."""
    program = cell.made_schedule.program(cell.plan)
    return simulate(program, cell.plan, cell.costs({}, overheads)).makespan / 1e9


# ---- the simulated table


def simulate_table(quick: bool) -> Report:
    """Simulate a step of every schedule."""
    lines, keys = [], {}
    for ranks in (4, 8):
        cells = make_cells(ranks)
        steps = {name: simulate_seconds(cell) for name, cell in cells.items()}
        held = {name: count_held_by(cell) for name, cell in cells.items()}
        lines += [
            f"simulated, {ranks} ranks, {2 * ranks} micro-batches, F = I = W = 10 ms on a rank; relative to 1F1B",
            "schedule     held half-stages  held   step ms   step  held x step",
        ]
        for name, step in steps.items():
            share, longer = held[name] / held["1F1B"], step / steps["1F1B"]
            lines.append(
                f"{name:12} {held[name]:16} {share:5.2f} {1e3 * step:9.1f} {longer:6.3f} {share * longer:12.3f}"
            )
        lines.append("")
        for key, name in V_KEYS.items():
            keys[f"{key}_held_{ranks}"] = held[name] / held["1F1B"]
            keys[f"{key}_simulated_{ranks}"] = steps[name] / steps["1F1B"]
    return Report(lines[:-1], keys)


# ---- held bytes

MAX_UNCOUNTED = 0.02
"""The largest share of the peak that may be freed without having been counted, because another thread created it."""


def memory_rank(rank: int, cells: dict[str, Cell]) -> dict[str, TensorBytes]:
    """Return the bytes of the tensors of this rank in the second step of each training, and of torch's ZB-V."""
    torch.set_num_threads(1)
    watch = join_ranks(rank, realtime=False)
    found = {}
    for name, cell in cells.items():
        step, engine = make_ours(cell, rank, watch, "auto")
        step(0)
        found[name] = count_tensor_bytes(lambda step=step: step(1))  # type: ignore[misc]
        engine.close()
    step, _ = make_torch(cells["ZB-V"], rank)
    step(0)
    found[PEER] = count_tensor_bytes(lambda: step(1))
    watch.close()
    return found


def measure_memory(quick: bool) -> Report:
    """Measure the bytes that the largest rank holds in a step."""
    lines: list[str] = []
    keys: dict[str, float] = {}
    for ranks in (8,) if quick else (4, 8):
        found = run_ranks(memory_rank, ranks, make_cells(ranks, "blocks", quick), timeout=300)
        uncounted = max(-each.rest / each.peak for of_rank in found for each in of_rank.values())
        if uncounted > MAX_UNCOUNTED:
            lines.append(f"memory on {ranks} ranks is not valid: {uncounted:.0%} of the peak was not counted")
            continue
        peaks = {name: max(of_rank[name].peak for of_rank in found) for name in found[0]}
        lines += [
            f"tensors of the largest rank, {ranks} ranks, {2 * ranks} micro-batches",
            "schedule       MiB  over 1F1B",
        ]
        lines += [f"{name:12} {peak / 2**20:6.1f} {peak / peaks['1F1B']:9.3f}" for name, peak in peaks.items()]
        keys |= {f"{key}_memory_{ranks}": peaks[name] / peaks["1F1B"] for key, name in V_KEYS.items()}
        keys[f"zbv_memory_vs_torch_{ranks}"] = peaks["ZB-V"] / peaks[PEER]
    if "v_half_memory_8" in keys:
        keys["v_half_memory"] = keys["v_half_memory_8"]
    return Report(lines, keys)


# ---- executed steps


def steps_rank(
    rank: int, cells: dict[str, Cell], learning: Sequence[Cell], rounds: int
) -> tuple[dict[str, EmulatedStep], list[EmulatedStep], list[str]]:
    """Run the steps of all sides in turn on this rank.

    Args:
        rank: this rank.
        cells: the trainings by name. ZB-V also runs on gloo, and with torch's schedule.
        learning: trainings that only measure the additional time of the engine. They run before the others.
        rounds: the number of steps of each side.

    Returns:
        The record of each side, the records of `learning`, and the kinds of torch's computations.
    """
    torch.set_num_threads(1)
    watch = join_ranks(rank, realtime=cells["ZB-V"].model == "emulated")
    learned = []
    for cell in learning:
        step, engine = make_ours(cell, rank, watch, "auto")
        learned.append(take_turns({"": step}, {"": engine}, LEARNING_STEPS)[""])
        engine.close()
    sides, engines = {}, {}
    for name, cell in cells.items():
        sides[name], engines[name] = make_ours(cell, rank, watch, "auto")
    sides[GLOO], engines[GLOO] = make_ours(cells["ZB-V"], rank, watch, "gloo")
    sides[PEER], schedule = make_torch(cells["ZB-V"], rank)
    found = take_turns(sides, engines, rounds)
    for engine in engines.values():
        engine.close()
    watch.close()
    order = [action.computation_type.value for action in schedule.pipeline_order[rank] if action is not None]
    return found, learned, order


def take_turns(
    sides: dict[str, Callable[[int], None]], engines: dict[str, Engine], rounds: int
) -> dict[str, EmulatedStep]:
    """Run one step of each side in every round, in alternating order, and return the record of each side."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in sides}
    events: dict[str, list[tuple[Event, ...]]] = {name: [] for name in sides}
    for number in range(WARM_UP + rounds):
        for name in list(sides) if number % 2 else reversed(sides):
            dist.barrier()
            started = read_nanoseconds()
            sides[name](number)
            spans[name].append((started, read_nanoseconds()))
            if name in engines:
                events[name].append(tuple(engines[name].events))
    return {name: EmulatedStep(tuple(spans[name][WARM_UP:]), tuple(events[name][WARM_UP:])) for name in sides}


def explain_noise_of(steps: dict[str, list[float]], load: float, base: str = PEER) -> str:
    """Return the reason why steps that took turns are not valid, or an empty text.

    Args:
        steps: the seconds of the steps of each side.
        load: the percentage of the processor that other programs used before.
        base: the side to which the steps are compared.
    """
    ratios = [[a / b for a, b in zip(took, steps[base], strict=True)] for took in steps.values()]
    return explain_noise(load, max(map(relative_spread, ratios)), MAX_SPREAD)


def compare_steps(ranks: int, quick: bool) -> Report:
    """Compare the executed steps of schedules on emulated stages with each other and with their simulations."""
    cells = make_cells(ranks, quick=quick)
    learning = [replace(make_cells(ranks)[name], microbatches=LEARNING) for name in ("1F1B", "ZB-H1")]
    load = measure_load()
    of_ranks = run_ranks(steps_rank, ranks, cells, learning, QUICK_ROUNDS if quick else ROUNDS, timeout=600)
    records, learned, orders = zip(*of_ranks, strict=True)
    steps = {name: step_seconds([found[name] for found in records]) for name in records[0]}
    title = f"executed, {ranks} ranks, {2 * ranks} micro-batches, F = I = W = {SCALE * 5:.0f} ms on a rank"
    if reason := explain_noise_of(steps, load):
        return Report([f"{title}: {reason}"])
    overheads = Overheads.of([(cell, found) for cell, *found in zip(learning, *learned, strict=True)], {})
    held = {name: count_held_by(cell) for name, cell in cells.items()}
    held |= {GLOO: held["ZB-V"], PEER: count_held(orders, halves=1)}
    lines = [
        title + f"; {overheads}",
        "schedule     held half-stages   step ms  over 1F1B (quartiles)   held x step  simulated ms  predicted ms",
    ]
    errors = []
    for name, took in steps.items():
        low, middle, high = statistics.quantiles(a / b for a, b in zip(took, steps["1F1B"], strict=True))
        step = statistics.median(took)
        line = f"{name:12} {held[name]:16} {1e3 * step:9.1f}  {middle:.3f} ({low:.3f}-{high:.3f})"
        line += f" {middle * held[name] / held['1F1B']:14.3f}"
        if name in cells:
            predicted = simulate_seconds(cells[name], overheads)
            line += f" {1e3 * simulate_seconds(cells[name]):13.1f} {1e3 * predicted:13.1f}"
            if cells[name].schedule == "v":
                errors.append(abs(predicted / step - 1))
        lines.append(line)

    def relative(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(steps[name], steps[other], strict=True))

    lines.append(f"simulated and executed steps of v differ by at most {max(errors):.1%}")
    return Report(
        lines,
        {
            **{f"{key}_step_{ranks}": relative(name, "1F1B") for key, name in V_KEYS.items()},
            f"zbv_vs_torch_{ranks}": relative("ZB-V", PEER),
            f"zbv_vs_torch_gloo_{ranks}": relative(GLOO, PEER),
            f"v_simulation_error_{ranks}": max(errors),
        },
    )


def measure_steps(quick: bool) -> Report:
    """Compare executed steps on 4 and on 8 ranks, or on 8 ranks only if it must be quick."""
    reports = {ranks: compare_steps(ranks, quick) for ranks in ((8,) if quick else (4, 8))}
    found: dict[str, float] = {}
    for report in reports.values():
        found |= report.keys
    keys = dict(found)
    if "v_half_step_8" in found:
        keys["v_half_step"] = found["v_half_step_8"]
    for name in ("zbv_vs_torch", "v_simulation_error"):
        if all(f"{name}_{ranks}" in found for ranks in reports):
            keys[name] = max(found[f"{name}_{ranks}"] for ranks in reports)
    return Report([line for report in reports.values() for line in (*report.lines, "")], keys)


def recompute_rank(rank: int, cells: dict[str, Cell], rounds: int) -> dict[str, EmulatedStep]:
    """Run the steps of all trainings in turn on this rank."""
    torch.set_num_threads(1)
    watch = join_ranks(rank)
    made = {name: make_ours(cell, rank, watch, "auto") for name, cell in cells.items()}
    found = take_turns(
        {name: step for name, (step, _) in made.items()}, {name: engine for name, (_, engine) in made.items()}, rounds
    )
    for _, engine in made.values():
        engine.close()
    watch.close()
    return found


def measure_recompute(quick: bool) -> Report:
    """Compare recomputation before and after the gradient has arrived."""
    cells = {name: replace(make_cells(4)["1F1B"], recompute=name) for name in ("late", "early")}
    load = measure_load()
    of_ranks = run_ranks(recompute_rank, 4, cells, QUICK_ROUNDS if quick else ROUNDS, timeout=300)
    steps = {name: step_seconds([found[name] for found in of_ranks]) for name in cells}
    title = f"executed, 1F1B with recomputation, 4 ranks, 8 micro-batches, F = I = W = {SCALE * 5:.0f} ms on a rank"
    if reason := explain_noise_of(steps, load, "early"):
        return Report([f"{title}: {reason}"])
    lines = [title, "recomputation    step ms  simulated ms"]
    for name, took in steps.items():
        lines.append(f"{name:12} {1e3 * statistics.median(took):11.1f} {1e3 * simulate_seconds(cells[name]):13.1f}")
    gain = statistics.median(late / early for late, early in zip(steps["late"], steps["early"], strict=True))
    return Report([*lines, f"late over early: {gain:.3f}"], {"recompute_gain": gain})


def measure_gpt(quick: bool) -> Report:
    """Compare ZB-V with torch's schedule on a GPT, whose backward is really split."""
    if quick:
        return Report(["ZB-V of a real GPT is compared with torch's without --quick only"])
    cell = replace(make_cells(2, "gpt")["ZB-V"], microbatches=8)
    load = measure_load()
    of_ranks = run_ranks(steps_rank, 2, {"ZB-V": cell}, (), ROUNDS, timeout=300)
    steps = {name: step_seconds([found[name] for found, _, _ in of_ranks]) for name in of_ranks[0][0]}
    title = "executed, GPT of 8 blocks of width 128 in 4 stages on 2 ranks, 8 micro-batches of 2 samples"
    if reason := explain_noise_of(steps, load):
        return Report([f"{title}: {reason}"])
    lines, keys = [title, f"schedule       step ms  over {PEER} (quartiles)"], {}
    for name, took in steps.items():
        low, middle, high = statistics.quantiles(a / b for a, b in zip(took, steps[PEER], strict=True))
        lines.append(f"{name:12} {1e3 * statistics.median(took):9.1f}  {middle:.3f} ({low:.3f}-{high:.3f})")
        keys[name] = middle
    return Report(lines, {"zbv_gpt_vs_torch": keys["ZB-V"], "zbv_gpt_vs_torch_gloo": keys[GLOO]})


PARTS = {
    "table": simulate_table,
    "memory": measure_memory,
    "steps": measure_steps,
    "recompute": measure_recompute,
    "gpt": measure_gpt,
    "tokens": compare_tokens,
}


if __name__ == "__main__":
    run_command(
        make_parser(__doc__, "fewer rounds, 8 ranks, and only the schedules of the headline numbers; within 120 s"),
        PARTS,
    )
