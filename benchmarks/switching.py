"""The cost of siblings of an array that take turns on a device with room for fewer of them: three ways to switch.

Two stages sleep instead of computing, so that the cores are free for the copies. The states are memory that is really
copied. In one run, four kinds of arrays take turns: all states fit on the device, states are brought there in advance
(prefetched), states are brought there on demand, and states are prefetched over a link that is too slow. They are
compared with two trainings that alternate by writing a checkpoint, stopping, and letting the other one resume.

The table shows the time of a step in which every sibling trains on one batch, its overhead over the array that fits,
and the number of states that were on the device when they were needed (hits), on their way (late), or not requested
(misses). The last column has the median time of a switch to another sibling.

    python benchmarks/switching.py [--quick] [--json] [--rounds N]
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn

from benchmarks.harness.emulated import EmulatedLayer, request_realtime_priority, sleeping_layer
from benchmarks.harness.report import QUIET, hush, make_parser
from lightning_pipes import JobArray, MemorySwap, PipelineStrategy
from lightning_pipes.arrays.memory_swap import Switching
from lightning_pipes.ir import Kind
from lightning_pipes.sim.timeline import Timeline
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.watchers.same_batch import N_CHECKED_BATCHES

STAGES, SIBLINGS, SLOTS = 2, 5, 3
FORWARD, BACKWARD = 0.060, 0.120
"""Seconds of a stage. All stages except the last one run forward again before backward."""
STATE, PIECES = 64 << 20, 24
"""Bytes of state of each sibling on each stage, and the number of its tensors.

The state represents weights and optimizer moments. It takes no part in the computation.
"""
LINK, SLOW_LINK = 25e9, 0.4e9
"""Bytes per second in each direction. On the slow link, moving states takes longer than the computation of a block."""
BATCHES = 10
"""The number of batches of each sibling."""
_MMAP_THRESHOLD = -3
"""The number of an option of glibc's allocator."""


class Jobs(L.LightningModule):
    """Layers that sleep, one on each stage, each with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Heavy() for _ in range(STAGES)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out: torch.Tensor = self.layers(batch[0])
        return out.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class _Heavy(EmulatedLayer):
    """An emulated layer with a state."""

    def __init__(self) -> None:
        super().__init__(sleeping_layer(FORWARD, BACKWARD, message_bytes=256))
        piece = STATE // PIECES // 4
        self.state = nn.ParameterList(nn.Parameter(torch.zeros(piece), requires_grad=False) for _ in range(PIECES))


def fit(batches: int, resume: Path | None = None, callbacks: Iterable[Callback] = ()) -> L.Trainer:
    """Train up to a total number of batches, and return the Trainer.

    Args:
        batches: the number of batches, including those before the checkpoint.
        resume: the checkpoint to continue from.
        callbacks: callbacks of the Trainer.
    """
    data = torch.utils.data.TensorDataset(torch.ones(4 * batches, 64))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=PipelineStrategy("jap", microbatches=1, partition=[1], recompute=True),
        max_steps=batches,
        callbacks=list(callbacks),
        **QUIET,
    )
    trainer.fit(Jobs(), torch.utils.data.DataLoader(data, 4), ckpt_path=resume)
    return trainer


# ---- siblings in an array


class Timed(MemorySwap):
    """Records how long the computation waits for each switch, in the steady state.

    The steady state lasts from when all siblings have had several turns until the first sibling ends.

    Attributes:
        uses: how often a state was on the device when it was needed ("hits"), on its way ("late"), or not requested
            ("misses").
        switches: for each of these, the seconds until the state of another sibling was available and bound.
        loads: the number of states that were brought to the device in this time.
    """

    def open(self, several: bool) -> None:
        """Reset the records."""
        super().open(several)
        self.uses: Counter[str] = Counter()
        self.switches: dict[str, list[float]] = {"hits": [], "late": [], "misses": []}
        self.loads = 0.0
        self._loaded: int | None = None
        self._turns: Counter[int] = Counter()
        self._last, self._ended = -1, False

    def begin_turn(self, index: int) -> None:
        """Count the turn and time the switch."""
        self._turns[index] += 1
        self._begin(index, partial(super().begin_turn, index))

    def begin_block(self, index: int, stage: int) -> None:
        """Time the switch."""
        self._begin(index, partial(super().begin_block, index, stage))

    def end_turn(self, *args: Any) -> None:
        """Give computation priority over copies, because a GPU has separate engines for copies."""
        super().end_turn(*args)
        for thread in threading.enumerate():
            if thread.name.startswith("copies") and thread.native_id is not None:
                with suppress(OSError):
                    os.sched_setscheduler(thread.native_id, os.SCHED_RR, os.sched_param(5))

    def release_sibling(self, index: int) -> None:
        """End the steady state when the first sibling ends."""
        self._ended = self._ended or self._turns[index] > N_CHECKED_BATCHES
        super().release_sibling(index)

    def _begin(self, index: int, begin: Callable[[], None]) -> None:
        before = {name: getattr(self.statistics, name) for name in self.switches}
        started = time.perf_counter()
        begin()
        took = time.perf_counter() - started
        enough = len(self._turns) == SIBLINGS and min(self._turns.values()) > N_CHECKED_BATCHES
        if enough and not self._ended:
            self._loaded = self.statistics.bytes_in if self._loaded is None else self._loaded
            self.loads = (self.statistics.bytes_in - self._loaded) / STATE
            for name in before:
                if getattr(self.statistics, name) > before[name]:
                    self.uses[name] += 1
                    if index != self._last:
                        self.switches[name].append(took)
        self._last = index


@dataclass(frozen=True)
class Found:
    """The measurements of one rank for an array.

    Attributes:
        step: seconds in which every sibling trains on one batch.
        uses, switches, loads: as in `Timed`.
        switching: the comparison of the time to move a state with the time of a block.
    """

    step: float
    uses: Counter[str]
    switches: dict[str, list[float]]
    loads: float = 0.0
    switching: Switching | None = None


def array(memory: Timed | None) -> Found:
    """Train all siblings together, and return the measurements of the steady state."""
    jobs: JobArray[None] = JobArray(SIBLINGS, progress=False, memory=memory)
    for outcome in jobs.run([_sibling] * SIBLINGS):
        if outcome.error is not None:
            raise outcome.error
    assert jobs.timeline is not None
    seconds = step_seconds(jobs.timeline)
    gc.collect()
    if memory is None:
        return Found(seconds, Counter(), {})
    return Found(seconds, memory.uses, memory.switches, memory.loads, memory.switching)


def _sibling() -> None:
    fit(BATCHES)


def step_seconds(timeline: Timeline) -> float:
    """Return the seconds in which every sibling trains on one batch, while all siblings take part."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for e in timeline.computations:
        if e.instruction.batch > N_CHECKED_BATCHES:
            first.setdefault(e.instruction.job, e.start)
        last[e.instruction.job] = e.end
    start, stop = max(first.values()), min(last.values())
    ends = [e.end for e in timeline.computations if e.rank == 0 and e.instruction.kind is Kind.B]
    ends = sorted(end for end in ends if start < end <= stop)
    return (ends[-1] - ends[0]) / (len(ends) - 1) * SIBLINGS / 1e9


# ---- stop and resume


class _Clock(Callback):
    """Records when the first batch begins and when the last batch ends."""

    def __init__(self) -> None:
        self.first, self.last = 0.0, 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self.first = self.first or time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.last = time.perf_counter()


def stop_and_resume(switches: int, folder: str) -> list[float]:
    """Return the seconds of each switch between two trainings.

    A switch lasts from the end of the last batch of one training to the start of the first batch of the other one.
    """
    seconds, ended = [], 0.0
    for number in range(switches + 2):
        path, clock = Path(folder) / f"{number % 2}.ckpt", _Clock()
        trainer = fit(2 * (number // 2 + 1), path if number > 1 else None, [clock])
        if number > 1:
            seconds.append(clock.first - ended)
        ended = clock.last
        trainer.save_checkpoint(path)
        del trainer
        gc.collect()
    return seconds


# ---- the whole benchmark

SIDES: dict[str, Callable[[], Timed | None]] = {
    "all fit": lambda: None,
    "prefetched": partial(Timed, 1 << 40, slots=SLOTS, bandwidth=LINK),
    "on demand": partial(Timed, 1 << 40, slots=SLOTS, bandwidth=LINK, prefetch=False),
    "slow link": partial(Timed, 1 << 40, slots=SLOTS, bandwidth=SLOW_LINK),
}


def rank_main(rank: int, rounds: int, switches: int, folder: str) -> tuple[dict[str, list[Found]], list[float]]:
    """Run all measurements on one rank.

    Returns:
        The measurements of the arrays by name, and the seconds of the switches by checkpoint.
    """
    hush()
    request_realtime_priority()
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)  # the memory of states that leave is free immediately
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found: dict[str, list[Found]] = {name: [] for name in SIDES}
    for number in range(rounds):
        names = list(SIDES)[: 2 if number else None]  # the first two differ least and need more rounds
        for name in names[:: 1 if number % 2 else -1]:
            dist.barrier()
            found[name].append(array(SIDES[name]()))
    dist.barrier()
    return found, stop_and_resume(switches, folder)


def report(by_rank: Sequence[tuple[dict[str, list[Found]], list[float]]]) -> dict[str, Any]:
    """Print the results of all ranks, and return the headline numbers."""
    found = {name: [f for of_rank, _ in by_rank for f in of_rank[name]] for name in SIDES}
    rounds = by_rank[0][0]
    plain = [f.step for f in rounds["all fit"]]
    print(
        f"{'states':12}{'step ms':>9}{'over all fit':>14}{'spread':>18}{'hits':>7}{'late':>6}{'misses':>8}"
        "  a switch, ms"
    )
    overheads = {}
    for name in SIDES:
        over = sorted(f.step / a - 1 for f, a in zip(rounds[name], plain, strict=False))
        uses: Counter[str] = sum((f.uses for f in found[name]), Counter())
        overheads[name] = statistics.median(over)
        line = f"{name:12}{statistics.median(f.step for f in rounds[name]) * 1e3:9.1f}"
        if name != "all fit":
            line += f"{overheads[name]:+14.2%}{f'{over[0]:+.2%} to {over[-1]:+.2%}':>18}"
            line += f"{uses['hits']:7}{uses['late']:6}{uses['misses']:8}  "
            each = {kind: took(found[name], kind) for kind in uses if took(found[name], kind)}
            line += ", ".join(f"{kind} {statistics.median(t) * 1e3:.2f}" for kind, t in each.items())
        print(line)
    for name in ("prefetched", "slow link"):
        for of_rank, _ in by_rank:
            print(f"{name}: {of_rank[name][0].switching}")
    predicted = statistics.median(map(predicted_step, by_rank[-1][0]["slow link"], plain))
    slow = statistics.median(f.step for f in rounds["slow link"])
    stops = [seconds for _, each in by_rank for seconds in each]
    print(
        f"slow link: {slow * 1e3:.0f} ms a step, {predicted * 1e3:.0f} ms predicted from E2 with the mean block, "
        f"{predicted / slow - 1:+.1%}"
    )
    print(f"stop and resume: {statistics.median(stops) * 1e3:.0f} ms, {min(stops):.2f} to {max(stops):.2f} s")
    hits = sum(f.uses["hits"] for f in found["prefetched"]) / sum(f.uses.total() for f in found["prefetched"])
    return {
        "switch_prefetched_ms": round(statistics.median(took(found["prefetched"], "hits")) * 1e3, 3),
        "switch_host_ms": round(statistics.median(took(found["on demand"], "misses")) * 1e3, 2),
        "switch_stop_resume_ms": round(statistics.median(stops) * 1e3),
        "prefetch_overhead": round(overheads["prefetched"], 4),
        "demand_overhead": round(overheads["on demand"], 4),
        "slow_link_overhead": round(overheads["slow link"], 4),
        "slow_link_predicted": round(predicted / statistics.median(plain) - 1, 4),
        "hit_rate": round(hits, 4),
        "e2_holds": all(f.switching is not None and f.switching.is_hidden for f in found["prefetched"]),
    }


def predicted_step(found: Found, plain: float) -> float:
    """Return the seconds of a step according to inequality E2 of ArrayPipe's paper.

    The prediction adds the visible time of each state that is moved to the first stage, which is the busiest. All
    blocks are assumed to be as long as the mean block. A batch has two blocks and one turn on this stage.

    Args:
        found: the measurements of the rank with the first stage.
        plain: seconds of a step if all states fit.
    """
    assert found.switching is not None
    loads = found.loads / (found.uses.total() / 3) * SIBLINGS
    return plain + loads * replace(found.switching, block=(2 * FORWARD + BACKWARD) / 2).visible_seconds


def took(found: Sequence[Found], kind: str) -> list[float]:
    """Return the seconds of all switches of a kind."""
    return [seconds for f in found for seconds in f.switches.get(kind, ())]


def main() -> None:
    """Measure all ways to switch and print the results."""
    parser = make_parser(__doc__, "one round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    rounds, switches = (1, 3) if options.quick else (options.rounds, 8)
    print(
        f"{os.cpu_count()} shared cores, torch {torch.__version__}, Lightning {L.__version__}, Python "
        f"{platform.python_version()}; {STAGES} emulated stages, {FORWARD * 1e3:.0f} ms forward and "
        f"{BACKWARD * 1e3:.0f} ms backward, {SIBLINGS} siblings on {SLOTS} slots, states of {STATE >> 20} MiB in "
        f"{PIECES} tensors, {LINK / 1e9:.0f} GB/s configured, {SLOW_LINK / 1e9} on the slow link; {rounds} rounds"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = report(run_ranks(rank_main, STAGES, rounds, switches, folder, timeout=1200))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
