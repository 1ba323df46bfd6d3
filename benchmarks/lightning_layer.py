"""What Lightning's loop and our strategy cost a step, on top of the bare engine: a real GPT in two stages. And what
Lightning's loop costs alone, in one process.

Both train the same model on the same batches with the same optimizer, some steps of each in turn within one training.

    python benchmarks/lightning_layer.py [--quick] [--json] [--turns N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count, pairwise
from typing import Any

import torch
from engine import gpt_parts
from silence import hush
from torch import nn

from lightning_pipes.testing.emulated import steady
from lightning_pipes.testing.ranks import run_ranks

RANKS, MICROBATCHES, ROWS, TOKENS = 2, 8, 16, 96
STEPS = 6
"""In a turn; from the end of the first to the end of the last."""


def batches(turns: int, rows: int) -> torch.utils.data.DataLoader[Any]:
    """The same batches for everybody."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (turns * STEPS * rows, TOKENS + 1), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=rows)


class Plain:
    """A plain loop, in one process or around the engine: the same model, schedule and optimizer, and nothing else."""

    def __init__(self, turns: int, rows: int) -> None:
        self._batches = iter(batches(turns, rows))
        self._layers = layers_of(gpt_parts(RANKS))
        self._train = self._forward_and_backward
        self.close: Callable[[], None] = lambda: None

    def piped(self, rank: int, watch: Any) -> Plain:
        """The same in a pipeline, of which this is one stage."""
        from lightning_pipes.engine import Engine, Item, Stage, make_transport
        from lightning_pipes.ir import Plan, Schedule, Span
        from lightning_pipes.ir.registry import make_schedule

        plan = Plan.even(RANKS, MICROBATCHES, ROWS)

        def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            rows = item.data[span.start : span.stop]
            out = stage.run_layers(item, span, rows[:, :-1] if received is None else received)
            if stage.number < RANKS - 1:
                return out
            return nn.functional.cross_entropy(out, rows[:, 1:]) * (span.rows / item.rows)

        schedule = make_schedule("1f1b")
        assert isinstance(schedule, Schedule)
        self._layers = nn.Sequential(*gpt_parts(RANKS)[rank])
        stage = Stage(rank, dict(enumerate(self._layers)), body)
        transport = make_transport(plan, rank, range(RANKS), torch.device("cpu"), watch)
        engine = Engine(plan, schedule.program(plan), [stage], transport, rank=rank, watch=watch)
        numbers = count()

        def train(x: torch.Tensor) -> None:
            engine.inject(Item(next(numbers), ROWS, x))
            engine.drain()

        self._train, self.close = train, engine.close
        return self

    def _forward_and_backward(self, x: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(self._layers(x[:, :-1]), x[:, 1:])
        torch.autograd.backward(loss)

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._layers.parameters(), lr=1e-3)

    def step(self) -> None:
        """One batch, and its update."""
        (x,) = next(self._batches)
        self._train(x)
        self._optimizer.step()
        self._optimizer.zero_grad()


def layers_of(parts: Sequence[nn.Sequential]) -> nn.Sequential:
    """The whole model."""
    return nn.Sequential(*(layer for part in parts for layer in part))


Turns = list[list[float]]
"""Seconds of each step, by turn."""


def in_turns(plain: Plain, turns: int, rows: int, **options: Any) -> tuple[Turns, Turns]:
    """Steps of the plain loop, and through Lightning, from the end of one batch to the end of the next. The plain loop
    runs in a callback of the same training."""
    import lightning as L

    alone: Turns = []
    through: Turns = []

    class GPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers_of(gpt_parts(RANKS))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            (rows,) = batch
            loss = nn.functional.cross_entropy(self.layers(rows[:, :-1]), rows[:, 1:])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class TakeTurns(L.Callback):
        """STEPS batches of the training, then as many of the plain loop."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *args: Any) -> None:
            self.ends.append(time.perf_counter())
            if len(self.ends) == STEPS:
                through.append([b - a for a, b in pairwise(self.ends)])
                ends = []
                for _ in range(STEPS):
                    plain.step()
                    ends.append(time.perf_counter())
                alone.append([b - a for a, b in pairwise(ends)])
                self.ends.clear()

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[TakeTurns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(GPT(), batches(turns, rows))
    plain.close()
    return alone[1:], through[1:]


def quiet() -> None:
    """One thread, real-time priority, no advice."""
    steady()
    torch.set_num_threads(1)
    hush()


def piped_rank(rank: int, turns: int) -> tuple[Turns, Turns]:
    """Two stages, ours on either side."""
    import torch.distributed as dist

    from lightning_pipes import PipelineStrategy
    from lightning_pipes.engine import FailureWatch

    quiet()
    dist.init_process_group("gloo")
    watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank)
    strategy = PipelineStrategy("1f1b", microbatches=MICROBATCHES, partition=[len(gpt_parts(RANKS)[0])])
    found = in_turns(Plain(turns, ROWS).piped(rank, watch), turns, ROWS, devices=RANKS, strategy=strategy)
    watch.close()
    return found


def single_rank(rank: int, turns: int) -> tuple[Turns, Turns]:
    """One process with nothing of ours, and a micro-batch a step: Lightning takes the same time beside any step."""
    quiet()
    few = ROWS // MICROBATCHES
    return in_turns(Plain(turns, few), turns, few, devices=1, strategy="single_device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="15 turns")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    turns = 15 if options.quick else options.turns
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {turns - 1} pairs of turns")
    keys: dict[str, float] = {}
    for name, rank_main, ranks in (("pipeline", piped_rank, RANKS), ("one_process", single_rank, 1)):
        plain, through = run_ranks(rank_main, ranks, turns, timeout=600)[0]
        pairs = zip(map(statistics.median, plain), map(statistics.median, through), strict=True)
        low, overhead, high = statistics.quantiles(1e3 * (b - a) for a, b in pairs)
        alone, whole = (1e3 * statistics.median(step for turn in side for step in turn) for side in (plain, through))
        print(f"{name:12} plain loop {alone:.1f} ms a step, through Lightning {whole:.1f} ms: ", end="")
        print(f"{overhead:.2f} ms more (quartiles {low:.2f} and {high:.2f})", flush=True)
        keys |= {f"{name}_overhead_ms": overhead, f"{name}_step_ms": alone}
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
