"""The slowdown of steps while layers move, and the time of a move (DynPipe, S V-C and table III).

The benchmark uses two emulated stages on two hosts with the shaped links of a network laboratory, which needs root.

The first table compares steps without a transfer, with a transfer whose chunks wait for messages of the training
("gate"), and with a transfer whose chunks do not wait ("neither"). The transfers last longer than the steps. In the
second table, a state as large as the state of Adam moves once during training. It is serialized as a whole before it is
sent, as torch.save does, or chunk by chunk during the transfer, and its chunks wait for messages of the training or do
not. In the third table, the Trainer moves a layer, with each value of `PipelineStrategy(relocation=...)`.
"""

from __future__ import annotations

import io
import logging
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.emulated import Emulation, join_ranks, sleeping_layer
from benchmarks.harness.netlab import NetLab
from benchmarks.harness.report import QUIET, Output
from lightning_pipes import PipelineStrategy
from lightning_pipes.engine import Engine, Item, make_transport
from lightning_pipes.engine.messages.bulk_transfer import BulkTransfer
from lightning_pipes.engine.messages.chunks import MAX_IN_FLIGHT
from lightning_pipes.ir import Plan, Span
from lightning_pipes.planning.planner import BLOCKING, BUFFERED, OVERLAPPED
from lightning_pipes.strategies.deep import Deep

KINDS = ("alone", "gate", "neither")
WAYS = {  # name: (whether the state is serialized before it is sent, the kind of transfer)
    "neither": (True, "neither"),
    "packed on the way": (False, "neither"),
    "behind training": (True, "gate"),
    "both": (False, "gate"),
}
MESSAGE = 2**17
"""Bytes of an activation."""


@dataclass(frozen=True)
class Trial:
    """Two stages and the link between them. A micro-batch takes 30 ms on each stage.

    Attributes:
        busy: the share of time for which messages of the training occupy the link.
        rounds: the number of rounds.
        moved: bytes that move in the second table.
        microbatches: the number of micro-batches in a batch.
        forward: seconds of a forward.
    """

    busy: float
    rounds: int
    moved: int
    microbatches: int = 10
    forward: float = 0.01

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the link."""
        return MESSAGE / (self.busy * 3 * self.forward)


@dataclass(frozen=True)
class Found:
    """The measurements of one rank.

    Attributes:
        steps: seconds of steps, by kind of transfer.
        rates: bytes per second that were transferred during steps, by kind.
        moves: for each entry of WAYS, the seconds until everything had arrived, the seconds until the end of the step
            in which this happened on all ranks, and the number of steps until then.
        alone: for each limit of chunks in flight, the seconds of a transfer without training, and the largest number of
            chunks that were in flight.
    """

    steps: dict[str, list[float]]
    rates: dict[str, list[float]]
    moves: dict[str, tuple[float, float, int]]
    alone: dict[int, tuple[float, int]]


class Rank:
    """One of the two stages, with transfers during its steps."""

    def __init__(self, rank: int, trial: Trial) -> None:
        self.rank, self.trial = rank, trial
        self.watch = join_ranks(rank, 2)
        plan = self.plan = replace(Plan.even(2, trial.microbatches), layers=(Span(0, 1), Span(1, 2)))
        layer = sleeping_layer(trial.forward, 2 * trial.forward, message_bytes=MESSAGE)
        order = Deep(6).program(plan)
        stages = Emulation(plan, order, (layer, layer), (1.0, 1.0)).stages(rank)
        transport = make_transport(plan, rank, range(2), torch.device("cpu"), self.watch)
        self.engine = Engine(plan, order, stages, transport, rank=rank)
        self.offices = {kind: BulkTransfer(rank, range(2), self.watch) for kind in KINDS[1:]}
        self.offices["neither"].set_gate(lambda: False)
        self.number = 0

    def step(self) -> float:
        """Run a step and return its seconds."""
        begun = time.monotonic()
        self.engine.inject(Item(self.number, self.plan.jobs[0].rows))
        self.engine.drain()
        self.number += 1
        return time.monotonic() - begun

    def send(self, kind: str, key: Any, content: Any) -> Any:
        """Start a transfer on the sending or the receiving rank, and return its handle."""
        parcels = self.offices[kind]
        return parcels.send(1, key, content) if self.rank == 0 else parcels.receive(0, key)

    def slowed(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Return the seconds of steps, and the bytes per second that were transferred during them, by kind."""
        content = torch.zeros(int(self.trial.bandwidth * 3 * self.trial.forward * (self.trial.microbatches + 4)) // 4)
        steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(self.trial.rounds + 1):
            for kind in KINDS:
                dist.barrier()
                handle, sent = None, 0
                if kind != "alone":
                    handle = self.send(kind, number, content)
                    time.sleep(0.05)  # so that the transfer has begun
                    sent = self.offices[kind].traffic.sent
                took = self.step()
                if number:  # the first round sets up channels
                    steps[kind].append(took)
                    rates[kind].append(0.0 if handle is None else (self.offices[kind].traffic.sent - sent) / took)
                if handle is not None:
                    handle.wait()
        return steps, rates

    def moves(self) -> dict[str, tuple[float, float, int]]:
        """Move a state during training in each way, see `Found.moves`."""
        third = self.trial.moved // 12
        state = {name: torch.ones(third) for name in ("weight", "exp_avg", "exp_avg_sq")}
        found = {}
        for way, (whole, kind) in WAYS.items():
            dist.barrier()
            begun, content, steps = time.monotonic(), state, 0
            if whole and self.rank == 0:
                file = io.BytesIO()
                torch.save(state, file)
                content = {"file": torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}
            packed = time.monotonic() - begun
            handle = self.send(kind, way, content)
            all_there = torch.zeros(1)
            while not all_there.item():
                self.step()
                steps += 1
                all_there.fill_(float(handle.is_done()))
                dist.all_reduce(all_there, dist.ReduceOp.MIN)
            found[way] = packed + handle.seconds, time.monotonic() - begun, steps
        return found

    def alone(self) -> dict[int, tuple[float, int]]:
        """Move a state without training, see `Found.alone`."""
        content, found = torch.zeros(self.trial.moved // 4), {}
        for limit in (1, MAX_IN_FLIGHT):
            dist.barrier()
            office = self.offices["gate"]
            office.traffic.most_in_flight = 0
            office.max_in_flight = limit
            handle = self.send("gate", f"alone {limit}", content).wait()
            found[limit] = handle.seconds, office.traffic.most_in_flight
        return found

    def close(self) -> None:
        """Close the engine and the channels of this rank."""
        self.engine.close()
        for office in self.offices.values():
            office.close()
        self.watch.close()


def rank_main(rank: int, trial: Trial) -> Found:
    """Run all measurements on one rank."""
    mine = Rank(rank, trial)
    steps, rates = mine.slowed()
    moves = mine.moves() if trial.moved else {}
    alone = mine.alone() if trial.moved else {}
    mine.close()
    return Found(steps, rates, moves, alone)


class Slow(nn.Module):
    """A layer with weights of 256 KiB that sleeps in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        out: torch.Tensor = self.linear(x)
        return out


class Noise(Dataset[torch.Tensor]):
    """Random samples, which are the same on every rank."""

    def __init__(self, rows: int) -> None:
        self.x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.x[row]


class Lit(pl.LightningModule):
    """A module with four slow layers and Adam, which keeps two more tensors for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Slow() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Moves(pl.Callback):
    """Moves a layer to another rank, and records the time of a step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.moved = trainer.strategy.current_run.relocation.moved
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        if batch_idx == 3:
            plan = replace(strategy.current_run.engine.plan, layers=(Span(0, 1), Span(1, 4)))
            strategy.adopt("1f1b", plan=plan)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.step = (time.monotonic() - self.began) / trainer.global_step


def trains(rank: int, way: str, batches: int) -> tuple[float, float, float, int]:
    """Train with the Trainer while a layer moves.

    Returns:
        Seconds of the move, the seconds of it in which no batch could run, seconds of a step, and the number of steps
        that were late or were taken by both ranks.
    """
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    moves = Moves()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=batches,
        strategy=PipelineStrategy("1f1b", 4, partition=[2], relocation=way, check_loss=False),
        callbacks=[moves],
        **QUIET,
    )
    trainer.fit(Lit(), DataLoader(Noise(4 * batches), batch_size=4))
    (move,) = moves.moved
    return move.seconds, move.waited, moves.step, move.late


def migration(rounds: int) -> Output:
    """Yield the three tables."""
    headline: dict[str, float] = {}
    yield "step time relative to no transfer (median and quartiles over rounds), and the link's use by transfers"
    for busy, name in ((0.5, "half"), (2 / 3, "two thirds")):
        trial = Trial(busy, rounds, 0 if busy == 0.5 else 3_000_000)
        with NetLab(2, trial.bandwidth) as lab:
            found = lab.run_ranks(rank_main, trial, timeout=600)
        slowest = {kind: [max(both) for both in zip(*(f.steps[kind] for f in found), strict=True)] for kind in KINDS}
        alone = statistics.median(slowest["alone"])
        yield f"training occupies {name} of the link, {1000 * alone:.0f} ms without a transfer"
        for kind in KINDS[1:]:
            ratios = [a / b for a, b in zip(slowest[kind], slowest["alone"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            share = statistics.median(found[0].rates[kind]) / trial.bandwidth
            key = {"gate": "migration_slowdown", "neither": "ungated_slowdown"}[kind]
            headline[key if name != "half" else f"{key}_half"] = round(middle - 1, 4)
            yield f"  {kind:9} {middle:.3f}  ({low:.3f} to {high:.3f})   {share:4.0%} of the link"
    yield f"{trial.moved / 1e6:g} MB move: iterations until they have arrived, and iterations that training has lost"
    for way in WAYS:
        seconds, until, steps = (max(both) for both in zip(*(f.moves[way] for f in found), strict=True))
        lost = until - steps * alone
        key = way.replace(", ", " ").replace(" ", "_")
        headline[f"iterations_{key}"], headline[f"lost_{key}"] = round(seconds / alone, 2), round(lost / alone, 3)
        yield f"  {way:18} {seconds / alone:5.1f}   {lost / alone:6.2f}   ({steps} steps)"
    for limit, (seconds, most) in found[0].alone.items():
        headline[f"alone_{limit}_in_flight"] = round(seconds, 3)
        yield f"  without training, at most {limit} chunks in flight: {seconds:.2f} s, {most} were in flight"
    yield "A layer of 256 KiB and its states of Adam move in a training, 1 MB/s: seconds until they have arrived,"
    yield "seconds in which no batch could run, and batches whose steps were late, or were taken by both ranks"
    with NetLab(2, 1e6) as lab:
        for move, key in ((BLOCKING, "drain"), (OVERLAPPED, "ahead"), (BUFFERED, "buffered")):
            both = lab.run_ranks(trains, move, 12, timeout=120)
            seconds, waited, step, late = (max(values) for values in zip(*both, strict=True))
            headline[f"waited_{key}"] = round(waited, 3)
            yield f"  {move:10} {seconds:6.2f}  {waited:6.2f}  {late:4}   (a step takes {step:.2f})"
    yield headline
