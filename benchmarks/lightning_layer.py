"""What Lightning's loop and our strategy cost a step, on top of the bare engine: a real GPT in two stages. And what
Lightning's loop costs alone, in one process.

Both train the same model on the same batches with the same optimizer, a step of each in turn within one training. The
layers compute all that they do, and go on computing until as much time has passed as nine in ten took at most in the
first steps: what they take swings by more than what is looked for. `ours_ms` is what the pipeline's step takes more
than the bare engine's, less what Lightning takes more than a plain loop in one process, `lightning_ms`.

A pair counts if no layer took longer than its pace, and no rank waited for a core, for more than `DISTURBED` of a step.
If fewer than half of the pairs count, or if these are too far apart, the measurement is not valid, and no number is
printed. `user_between_ms` is what a user pays without any pace: the time from the last backward of a step to the first
forward of the next one in an ordinary training, which has the optimizer, the data, Lightning's loop and ours in it.

Ranks run with the priority that everybody has. At real-time priority two ranks that keep two cores busy make every
helper thread of a rank wait for its turn, which is a tenth of a second.

    python benchmarks/lightning_layer.py [--quick] [--json] [--pairs N]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.engine import gpt_parts
from benchmarks.harness.report import describe_machine, make_parser
from benchmarks.harness.silence import QUIET, hush
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.trial import waited_so_far

RANKS, MICROBATCHES, ROWS, TOKENS = 2, 8, 16, 96
WARM_UP = 5
"""Pairs of steps that show how long layers take."""
DISTURBED = 0.02
"""The share of a step that layers may exceed their pace by, and ranks may wait for a core."""
SPREAD = 0.02
"""The share of a step that the middle half of all differences may differ by, or by their median."""


class Pace:
    """How long a layer takes, forward and backward: as it does at first, then always as long as it mostly did.

    Attributes:
        late: seconds by which the layer's own work exceeded that.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {"forward": [], "backward": []}
        self._seconds: dict[str, float] = {}
        self._started = {"forward": 0.0, "backward": 0.0}
        self._matrix = torch.eye(64)
        self.late = 0.0

    def start(self, what: str) -> None:
        """The layer begins."""
        self._started[what] = time.perf_counter()

    def end(self, what: str) -> None:
        """Returns when the layer may end."""
        if self._seconds:
            end = self._started[what] + self._seconds[what]
            self.late += max(0.0, time.perf_counter() - end)
            while time.perf_counter() < end:  # a sleep would let caches and clocks go cold
                torch.mm(self._matrix, self._matrix)
        else:
            self._seen[what].append(time.perf_counter() - self._started[what])

    def settle(self) -> None:
        """From now on always the same."""
        for what, seen in self._seen.items():
            seen.sort()
            self._seconds[what] = seen[9 * len(seen) // 10] if seen else 0.0


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and calls `reached` when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.reached()
        return gradients[0], None


class Paced(nn.Module):
    """A layer that takes as long as its pace says."""

    def __init__(self, layer: nn.Module, pace: Pace) -> None:
        super().__init__()
        self.layer, self.pace = layer, pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pace.start("forward")
        if x.is_floating_point():
            x = _Mark.apply(x, lambda: self.pace.end("backward"))  # type: ignore[no-untyped-call]
        out = self.layer(x)
        if x.is_floating_point():
            out = _Mark.apply(out, lambda: self.pace.start("backward"))  # type: ignore[no-untyped-call]
        self.pace.end("forward")
        return out  # type: ignore[no-any-return]


class Paces:
    """Those of the model's layers, wherever they are."""

    def __init__(self) -> None:
        self._paces = [[Pace() for _ in part] for part in gpt_parts(RANKS)]

    def parts(self) -> list[nn.Sequential]:
        """The model, stage by stage."""
        pairs = zip(gpt_parts(RANKS), self._paces, strict=True)
        return [nn.Sequential(*map(Paced, part, paces)) for part, paces in pairs]

    @property
    def late(self) -> float:
        """Seconds by which layers took longer than their pace so far."""
        return sum(pace.late for part in self._paces for pace in part)

    def settle(self) -> None:
        """From now on every layer always takes the same time."""
        for pace in (pace for part in self._paces for pace in part):
            pace.settle()


def batches(pairs: int, rows: int) -> torch.utils.data.DataLoader[Any]:
    """The same batches for everybody."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, ((WARM_UP + pairs) * rows, TOKENS + 1), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=rows)


class Plain:
    """A plain loop, in one process or around the engine: the same model, schedule and optimizer, and nothing else."""

    def __init__(self, pairs: int, rows: int, paces: Paces) -> None:
        self._batches = iter(batches(pairs, rows))
        self._parts = paces.parts()
        self._layers = layers_of(self._parts)
        self._train = self._forward_and_backward
        self.close: Callable[[], None] = lambda: None

    def piped(self, rank: int, watch: Any) -> Plain:
        """The same in a pipeline, of which this is one stage."""
        from lightning_pipes.engine import Engine, Item, Stage, make_transport
        from lightning_pipes.ir import Plan, Schedule, Span
        from lightning_pipes.ir.registry import make_schedule

        where = tuple(reversed(range(RANKS)))  # as in the training: the last stage on rank 0
        plan = Plan.even(RANKS, MICROBATCHES, ROWS, where)

        def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            rows = item.data[span.start : span.stop]
            out = stage.run_layers(item, span, rows[:, :-1] if received is None else received)
            if stage.number < RANKS - 1:
                return out
            return nn.functional.cross_entropy(out, rows[:, 1:]) * (span.rows / item.rows)

        schedule = make_schedule("1f1b")
        assert isinstance(schedule, Schedule)
        number = where.index(rank)
        self._layers = self._parts[number]
        stage = Stage(number, dict(enumerate(self._layers)), body)
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


class Took(NamedTuple):
    """A step of one rank.

    Attributes:
        start, end: nanoseconds of the monotonic clock.
        disturbed: seconds by which layers exceeded their pace, and for which the rank waited for a core.
    """

    start: int
    end: int
    disturbed: float


class Watch:
    """Times steps, and what disturbs them."""

    def __init__(self, paces: Paces) -> None:
        self._paces = paces
        self._start, self._before = 0, 0.0

    def start(self) -> None:
        """A step begins."""
        self._before = self._paces.late + waited_so_far() / 1e9
        self._start = time.monotonic_ns()

    def end(self) -> Took:
        """Return the step that ends."""
        end = time.monotonic_ns()
        return Took(self._start, end, self._paces.late + waited_so_far() / 1e9 - self._before)


def in_turns(plain: Plain, paces: Paces, pairs: int, rows: int, **options: Any) -> list[tuple[Took, Took]]:
    """A step of the plain loop and one through Lightning, pair by pair; all ranks begin each together. The plain loop
    runs in a callback of the same training."""
    import lightning as L

    spans: list[tuple[Took, Took]] = []

    class GPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers_of(paces.parts())

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            (rows,) = batch
            loss = nn.functional.cross_entropy(self.layers(rows[:, :-1]), rows[:, 1:])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class TakeTurns(L.Callback):
        """A batch of the training, from the end of the plain loop's on: then one of the plain loop."""

        def __init__(self) -> None:
            self.before: Took | None = None  # the plain step
            self.watch = Watch(paces)

        def on_train_batch_end(self, *args: Any) -> None:
            if self.before is not None:
                spans.append((self.before, self.watch.end()))
            if len(spans) == WARM_UP:
                paces.settle()
            together()
            self.watch.start()
            plain.step()
            self.before = self.watch.end()
            together()
            self.watch.start()

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[TakeTurns()],
        **QUIET,
        **options,
    )
    trainer.fit(GPT(), batches(pairs, rows))
    plain.close()
    return spans[WARM_UP:]


def together() -> None:
    """Returns when all ranks are here."""
    if dist.is_initialized():
        dist.barrier()


def quiet() -> None:
    """One thread, no advice."""
    torch.set_num_threads(1)
    hush()


def piped_rank(rank: int, pairs: int) -> list[tuple[Took, Took]]:
    """Two stages, ours on either side."""
    from lightning_pipes import PipelineStrategy
    from lightning_pipes.engine import FailureWatch

    quiet()
    dist.init_process_group("gloo")
    # Of its own, for the strategy's watch takes what is not its own for somebody else's.
    store = dist.PrefixStore("engine", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    watch = FailureWatch(store, rank)
    strategy = PipelineStrategy("1f1b", microbatches=MICROBATCHES, partition=[len(gpt_parts(RANKS)[0])])
    paces = Paces()
    plain = Plain(pairs, ROWS, paces).piped(rank, watch)
    found = in_turns(plain, paces, pairs, ROWS, devices=RANKS, strategy=strategy)
    watch.close()
    return found


def single_rank(rank: int, pairs: int) -> list[tuple[Took, Took]]:
    """One process with nothing of ours, and a micro-batch a step: Lightning takes the same time beside any step."""
    quiet()
    few, paces = ROWS // MICROBATCHES, Paces()
    return in_turns(Plain(pairs, few, paces), paces, pairs, few, devices=1, strategy="single_device")


def user_rank(rank: int, steps: int) -> tuple[float, float]:
    """An ordinary training: the median seconds from one step to the next one, and of a step."""
    import lightning as L

    from lightning_pipes import PipelineStrategy

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

    quiet()
    strategy = PipelineStrategy("1f1b", microbatches=MICROBATCHES, partition=[len(gpt_parts(RANKS)[0])])
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(GPT(), batches(steps, ROWS))
    record = strategy.report.record
    assert record.between is not None
    return record.between, record.displayed_timeline.makespan / 1e9


def seconds(spans: Sequence[Took]) -> float:
    """Of a step, from the first rank's start to the last one's end."""
    return (max(took.end for took in spans) - min(took.start for took in spans)) / 1e9


def is_disturbed(pair: Sequence[tuple[Took, Took]]) -> bool:
    """Return whether either step of a pair was disturbed on any rank."""
    return any(1e9 * took.disturbed > DISTURBED * (took.end - took.start) for of_rank in pair for took in of_rank)


def explain_invalid(overheads: Sequence[float], pairs: int, step: float) -> str:
    """Return why differences in milliseconds are not a measurement; empty if they are.

    Args:
        overheads: of the pairs that count.
        pairs: the number of all.
        step: milliseconds of a step.
    """
    if len(overheads) < pairs / 2:
        return (
            f"not valid: in {pairs - len(overheads)} of {pairs} pairs layers took longer than their pace, or ranks "
            "waited for a core, because of other programs or of too few cores"
        )
    low, middle, high = statistics.quantiles(overheads)
    if high - low > max(abs(middle), SPREAD * step):
        return f"not valid: the middle half of {len(overheads)} pairs is from {low:.2f} to {high:.2f} ms"
    return ""


def main() -> None:
    parser = make_parser(__doc__, "60 pairs")
    parser.add_argument("--pairs", type=int, default=200, help="steps of either kind")
    options = parser.parse_args()
    pairs = 60 if options.quick else options.pairs
    print(f"{describe_machine()}, torch {torch.__version__}; {pairs} pairs of steps")
    keys: dict[str, float] = {}
    for name, rank_main, ranks in (("pipeline", piped_rank, RANKS), ("one_process", single_rank, 1)):
        by_rank = run_ranks(rank_main, ranks, pairs, timeout=600)
        counted = [pair for pair in zip(*by_rank, strict=True) if not is_disturbed(pair)]
        steps = [tuple(seconds(spans) for spans in zip(*pair, strict=True)) for pair in counted]
        overheads = [1e3 * (through - plain) for plain, through in steps]
        why = explain_invalid(overheads, pairs, 1e3 * statistics.median(plain for plain, _ in steps) if steps else 0.0)
        if why:
            print(f"{name:12} {why}", flush=True)
            continue
        low, overhead, high = statistics.quantiles(overheads)
        plain, through = (1e3 * statistics.median(side) for side in zip(*steps, strict=True))
        print(f"{name:12} plain loop {plain:.1f} ms a step, through Lightning {through:.1f} ms: ", end="")
        print(f"{overhead:.2f} ms more (quartiles {low:.2f} and {high:.2f})", flush=True)
        keys |= {f"{name}_overhead_ms": overhead, f"{name}_step_ms": plain}
    if len(keys) == 4:
        keys["lightning_ms"] = keys["one_process_overhead_ms"]
        keys["ours_ms"] = keys["pipeline_overhead_ms"] - keys["lightning_ms"]
        found = f"{keys['lightning_ms']:.2f} ms are Lightning's, {keys['ours_ms']:.2f} ms are ours"
        print(f"of a step in the pipeline {found}")
    else:
        print("so there is no ours_ms; repeat it on a quiet machine with more cores than ranks")
    between, step = run_ranks(user_rank, RANKS, max(20, pairs // 2), timeout=600)[0]
    keys["user_between_ms"] = 1e3 * between
    print(f"a user pays {1e3 * between:.2f} ms between two steps of {1e3 * step:.1f} ms, with the optimizer and data")
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
