"""The cost of tuning for a training, of a change of schedule for the next step, and of a choice alone.

The first two are measured in a Trainer with emulated stages on shaped links, which needs root on Linux. The cost of a
choice is processor time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import nn

from benchmarks.harness.emulated import EmulatedLayer, request_realtime_priority, sleeping_layer
from benchmarks.harness.netlab import NetLab, lab_unavailable_reason
from benchmarks.harness.report import QUIET, Output, describe_machine, hush
from benchmarks.kfkb import MICROBATCHES, QUICK_MESSAGE, SPEEDS, STAGES, Situation, directions, ordered
from benchmarks.papers.kfkb.links import bandwidth
from benchmarks.papers.kfkb.replay import Replay, Trace
from lightning_pipes import PipelineStrategy, ScheduleTuner
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.candidates import Candidate, tuning_planner
from lightning_pipes.planning.measured import WINDOW_STEPS, Averages, StepSample
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.planning.tuning import CandidateRanker
from lightning_pipes.sim import load_kernel
from lightning_pipes.sim.loops.kernel import SIMULATION_KERNELS
from lightning_pipes.trainer.callbacks.schedule_tuner import FIRST_DECISION_BATCH
from lightning_pipes.trainer.loop.adopting import adopt_candidate

FORWARD, X = 0.005, 0.5
EACH = 3
"""The number of batches from one change to the next."""


class Model(L.LightningModule):
    """A module in which each stage is a layer that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        layer = sleeping_layer(FORWARD, 2 * FORWARD, message_bytes=QUICK_MESSAGE)
        self.layers = nn.Sequential(*(EmulatedLayer(layer) for _ in range(STAGES)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        found: torch.Tensor = self.layers(batch[0]).mean()
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Records the end of each batch. It must be the last callback."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


class Changes(L.Callback):
    """Changes between schedules of the same speed every few batches, as after a decision of the tuner."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        number = trainer.fit_loop.total_batch_idx + 1
        if number % EACH == 0:
            names = [("deep", {"slack": 3}), ("kfkb", {"k": 2}), ("deep", {"slack": 4}), ("kfkb", {"k": 3})]
            name, settings = names[number // EACH % len(names)]
            schedule = make_schedule(name, **settings)
            change = Candidate(schedule, solve_plan(Problem(schedule, STAGES, MICROBATCHES, MICROBATCHES)), ())
            since = time.perf_counter()
            adopt_candidate(trainer.strategy.current_run, change)  # type: ignore[attr-defined]
            self.took.append(time.perf_counter() - since)


def fit(batches: int, *callbacks: L.Callback, **settings: Any) -> list[float]:
    """Train, and return the seconds from the end of each batch to the end of the next one."""
    data = torch.utils.data.TensorDataset(torch.zeros(batches * MICROBATCHES, QUICK_MESSAGE // 4))
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=PipelineStrategy("kfkb", microbatches=MICROBATCHES, partition=[1, 2, 3], schedule_args=settings),
        max_epochs=1,
        callbacks=[*callbacks, clock],
        **QUIET,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=MICROBATCHES))
    return [b - a for a, b in pairwise(clock.ends)]


def rank_main(rank: int, batches: int) -> dict[str, Any]:
    """Run two trainings on one rank, one with forced changes of schedule and one with the tuner.

    Returns:
        The times of changes and of the steps around them, and the times of batches and decisions with the tuner.
    """
    request_realtime_priority()
    hush()
    changes, tuner = Changes(), ScheduleTuner(interval=10)
    around = fit(batches, changes, k=2)
    tuned = fit(batches, tuner, k="auto")
    return {
        "changes": changes.took,
        "steps": around,
        "tuned": tuned,
        "decisions": [(t.batch, t.seconds, str(t.decision)) for t in tuner.decisions],
    }


def choosing(stages: int, microbatches: int) -> dict[str, float]:
    """Return processor milliseconds to set up all candidates once, of the first choice, and of later choices.

    For later choices, the median and the largest time are returned. Each choice is made after a step of 1F1B, among all
    candidates and without a memory limit. The messages take 0 to 3 forwards in turn.
    """
    source, first = tuning_planner(make_schedule("kfkb", k="auto")), make_schedule("kfkb", k=1)
    case = Situation(20, stages, microbatches)
    plan, base = case.plan, case.costs(0.0)
    chooser, averages = CandidateRanker(), Averages(window=1)
    took: list[float] = []

    def timed(work: Callable[[], object]) -> None:
        began = time.process_time()
        work()
        took.append(1e3 * (time.process_time() - began))

    def choose() -> None:
        candidates = source.list_candidates(plan, averages.costs(base))
        chooser.decide(candidates, Candidate(first, plan, ()), averages, base)

    timed(lambda: chooser.prepare(source.list_candidates(plan, base), base))
    for n, x in enumerate(SPEEDS * 3):
        links = dict.fromkeys(directions(stages), Trace.steady(case.message(x) + n))
        replay = Replay(ordered(first, plan), plan, case.times, links)
        averages.add(StepSample.from_events(events, plan) for events in replay.by_rank())
        timed(choose)
    set_up, *each = took
    return {"set_up": set_up, "first": each[0], "median": statistics.median(each), "most": max(each)}


def choosing_table() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the results of `choosing` by name, without compiled code and, if numba is installed, with it."""
    gc.collect()
    gc.freeze()  # so that collections skip the objects of all imported modules
    for patience in (1 << 60, 0):
        SIMULATION_KERNELS.patience = patience
        name = load_kernel() if not patience else "python"
        if patience or name != "python":
            for stages, microbatches in ((2, 4), (4, 24), (8, 64)) * (1 if patience else 2):
                yield f"{name}_{stages}x{microbatches}", choosing(stages, microbatches)


def tuner(batches: int) -> Output:
    """Yield the cost of a choice, and the costs of decisions and changes in a training."""
    yield f"{describe_machine()}, torch {torch.__version__}"
    planning = dict(choosing_table())  # keeps the second round, because the first one loads compiled code
    yield "choosing, ms:         " + " ".join(f"{name:>8}" for name in next(iter(planning.values())))
    for situation, times in planning.items():
        yield f"  {situation:20}" + " ".join(f"{ms:8.1f}" for ms in times.values())
    yield {f"planning_ms_{situation}": round(times["most"], 5) for situation, times in planning.items()}
    if reason := lab_unavailable_reason():
        yield f"The cost for a training can't be measured here: {reason}"
        return
    with NetLab(STAGES, bandwidth(X * FORWARD, QUICK_MESSAGE)) as lab:
        ranks = lab.run_ranks(rank_main, batches, timeout=400)
    steps = ranks[0]["steps"]
    # steps[n] ends batch n + 1 (from 0); a change comes after batches EACH - 1, 2 EACH - 1, ...
    first = [s for n, s in enumerate(steps) if (n + 1) % EACH == 0 and n >= EACH]
    later = [s for n, s in enumerate(steps) if (n + 1) % EACH and n >= EACH]
    step = statistics.median(later)
    call = [max(took) for took in zip(*(r["changes"] for r in ranks), strict=True)]
    loss = statistics.median(first) / step - 1
    after = 1e3 * statistics.median(first)
    yield f"a step {1e3 * step:.1f} ms; the first step after a change {after:.1f} ms, {loss:+.2%}"
    yield f"the change itself, slowest rank: {1e3 * statistics.median(call):.2f} ms, at most {1e3 * max(call):.2f} ms"
    tuned, decisions = ranks[0]["tuned"], ranks[0]["decisions"]
    yield f"decisions took {', '.join(f'{1e3 * seconds:.1f}' for _, seconds, _ in decisions)} ms"
    at = {batch - 2 for batch, _, _ in decisions[1:]}  # tuned[n] begins when batch n + 1 ends
    usual = statistics.median(
        s for n, s in enumerate(tuned) if n > FIRST_DECISION_BATCH + WINDOW_STEPS and n not in at and n - 1 not in at
    )
    longer = [tuned[n] + tuned[n + 1] - 2 * usual for n in sorted(at) if n + 1 < len(tuned)]
    share = sum(longer) / sum(tuned)
    more = 1e3 * statistics.median(longer)
    yield f"and the batches around them {more:.1f} ms more, in total {share:.2%} of the training"
    for _, _, said in decisions:
        yield f"  {said}"
    found = {"switch_loss": loss, "switch_share": statistics.median(call) / step, "tuning_share": share}
    yield {name: round(value, 5) for name, value in found.items()}
