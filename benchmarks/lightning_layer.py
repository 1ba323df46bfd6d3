"""The cost of Lightning's loop and of our strategy for each step, in addition to the bare engine.

A real GPT is trained in two stages, and also in one process to measure the cost of Lightning's loop alone.

The plain loop and the training with Lightning use the same model, batches and optimizer. Their steps alternate within
one training. To remove the variation of computing times, which is larger than the measured differences, each layer is
paced: it computes, and then continues computing until a fixed time has passed. This time is the 90th percentile of the
layer's times in the first steps.

- `lightning_ms` is the difference between a step with Lightning and a step of the plain loop in one process.
- `ours_ms` is the difference between a step in the pipeline and a step of the bare engine, minus `lightning_ms`.
- `units_over_layers` is the time of a step by units over the time of a step by layers, both with the strategy and
  relative to the bare engine. `units_more_calls` is the number of Python and C calls that a stage makes more by units
  for each micro-batch. It does not depend on the load of the machine.
- `user_between_ms` is the cost for a user, without paced layers: the time from the last backward of a step to the first
  forward of the next step in an ordinary training. It includes the optimizer, the data, Lightning's loop and our
  strategy.

A pair of steps counts if the time by which layers exceeded their pace and the time for which a rank waited for a core
are together at most `DISTURBED` of each step. If fewer than half of the pairs count, or if their differences vary too
much, the measurement is not valid, and its numbers are not printed.

Ranks run with normal priority. With real-time priority, two ranks that keep two cores busy would make each helper
thread of a rank wait for its turn, which takes a tenth of a second.

    python benchmarks/lightning_layer.py [--quick] [--json] [--pairs N]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import count
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.engine import gpt_parts
from benchmarks.harness.report import QUIET, describe_machine, hush, make_parser
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.trial import waited_so_far

RANKS, MICROBATCHES, ROWS, TOKENS = 2, 8, 16, 96
WARM_UP = 5
"""The number of pairs of steps that measure how long layers take."""
COUNTED = range(10, 14)
"""The steps whose calls are counted. No check runs in them that runs in the first steps only."""
NOT_COUNTED = (
    *("engine/messages", "engine/engine.py", "engine/watch", "trainer/ranks", "threading.py", "queue.py", "selectors"),
    *("order.py", "/distributed/", "torch/optim", "lightning/pytorch", "lightning/fabric"),
)
"""The files whose calls are not counted, because they depend on waiting or are not ours."""
DISTURBED = 0.02
"""The share of a step by which layers may exceed their pace and for which ranks may wait for a core, in total."""
SPREAD = 0.02
"""The largest range of the middle half of all differences, as a share of a step.

A larger range is allowed if it does not exceed the median difference.
"""


class Pace:
    """The pace of a layer: its times are recorded at first and then fixed.

    Attributes:
        late: seconds by which the layer's own work exceeded the fixed times.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {"forward": [], "backward": []}
        self._seconds: dict[str, float] = {}
        self._started = {"forward": 0.0, "backward": 0.0}
        self._matrix = np.eye(64, dtype=np.float32)
        self.late = 0.0

    def start(self, what: str) -> None:
        """Record the time at which the layer begins.

        Args:
            what: "forward" or "backward".
        """
        self._started[what] = time.perf_counter()

    def end(self, what: str) -> None:
        """Wait until the layer may end its forward or its backward, or record its time if the pace is not fixed yet.

        Args:
            what: "forward" or "backward".
        """
        if self._seconds:
            end = self._started[what] + self._seconds[what]
            self.late += max(0.0, time.perf_counter() - end)
            while time.perf_counter() < end:  # a sleep would cool down the caches and lower the clock speed
                _ = self._matrix @ self._matrix  # not by torch: units of a step must not depend on time
        else:
            self._seen[what].append(time.perf_counter() - self._started[what])

    def settle(self) -> None:
        """Fix the times of the layer to the 90th percentile of the recorded times."""
        for what, seen in self._seen.items():
            seen.sort()
            self._seconds[what] = seen[9 * len(seen) // 10] if seen else 0.0


class _Mark(torch.autograd.Function):
    """Returns its input, and calls `reached` when its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.reached()
        return gradients[0], None


class Paced(nn.Module):
    """A layer that takes the time specified by its pace."""

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
    """The paces of all layers of the model, which are shared by all copies of the model in this process."""

    def __init__(self) -> None:
        self._paces = [[Pace() for _ in part] for part in gpt_parts(RANKS)]

    def parts(self) -> list[nn.Sequential]:
        """Return the paced model, stage by stage."""
        pairs = zip(gpt_parts(RANKS), self._paces, strict=True)
        return [nn.Sequential(*map(Paced, part, paces)) for part, paces in pairs]

    @property
    def late(self) -> float:
        """The total seconds by which layers took longer than their pace so far."""
        return sum(pace.late for part in self._paces for pace in part)

    def settle(self) -> None:
        """Fix the times of all layers."""
        for pace in (pace for part in self._paces for pace in part):
            pace.settle()


def batches(pairs: int, rows: int) -> torch.utils.data.DataLoader[Any]:
    """Return a data loader with the same batches for all sides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, ((WARM_UP + pairs) * rows, TOKENS + 1), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=rows)


class Plain:
    """A plain loop in one process or around the engine, with the same model, schedule and optimizer as with Lightning.

    Args:
        pairs: the number of pairs of steps.
        rows: the number of samples in a batch.
        paces: the paces of the layers.
    """

    def __init__(self, pairs: int, rows: int, paces: Paces) -> None:
        self._batches = iter(batches(pairs, rows))
        self._parts = paces.parts()
        self._layers = layers_of(self._parts)
        self._train = self._forward_and_backward
        self.close: Callable[[], None] = lambda: None

    def piped(self, rank: int, watch: Any) -> Plain:
        """Turn this loop into one stage of a pipeline and return it.

        Args:
            rank: the rank of this process.
            watch: the failure watch of this rank.
        """
        from lightning_pipes.engine import Engine, Item, Stage, make_transport
        from lightning_pipes.ir import Plan, Schedule, Span
        from lightning_pipes.ir.registry import make_schedule

        where = tuple(reversed(range(RANKS)))  # as in the training: the last stage is on rank 0
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
        """Train on one batch and update the weights."""
        (x,) = next(self._batches)
        self._train(x)
        self._optimizer.step()
        self._optimizer.zero_grad()


def layers_of(parts: Sequence[nn.Sequential]) -> nn.Sequential:
    """Return the whole model."""
    return nn.Sequential(*(layer for part in parts for layer in part))


def make_gpt(parts: Sequence[nn.Sequential]) -> Any:
    """Return the LightningModule that trains a model."""
    import lightning as L

    class GPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers_of(parts)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            (rows,) = batch
            loss = nn.functional.cross_entropy(self.layers(rows[:, :-1]), rows[:, 1:])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return GPT()


def make_strategy(by_units: bool) -> Any:
    """Return the strategy, which cuts the model between two layers.

    Args:
        by_units: whether the model is cut by units, at the same place.
    """
    from lightning_pipes import PipelineStrategy

    cut: dict[str, Any] = {"module": ""} if by_units else {}
    return PipelineStrategy("1f1b", microbatches=MICROBATCHES, partition=[len(gpt_parts(RANKS)[0])], **cut)


class Took(NamedTuple):
    """The time of a step on one rank.

    Attributes:
        start, end: nanoseconds of the monotonic clock.
        disturbed: seconds by which layers exceeded their pace plus seconds for which the rank waited for a core.
    """

    start: int
    end: int
    disturbed: float


class Watch:
    """Measures the times of steps and their disturbances."""

    def __init__(self, paces: Paces) -> None:
        self._paces = paces
        self._start, self._before = 0, 0.0

    def start(self) -> None:
        """Record that a step begins."""
        self._before = self._paces.late + waited_so_far() / 1e9
        self._start = time.monotonic_ns()

    def end(self) -> Took:
        """Record that the step ends, and return its time."""
        end = time.monotonic_ns()
        return Took(self._start, end, self._paces.late + waited_so_far() / 1e9 - self._before)


def in_turns(plain: Plain, paces: Paces, pairs: int, rows: int, **options: Any) -> list[tuple[Took, Took]]:
    """Run a step of the plain loop and a step with Lightning, pair by pair. All ranks begin each step together.

    The plain loop runs in a callback of the training with Lightning.

    Args:
        plain: the plain loop.
        paces: the paces of the layers.
        pairs: the number of pairs.
        rows: the number of samples in a batch.
        **options: arguments of the Trainer.

    Returns:
        The times of the plain step and of the step with Lightning, for each pair after the warm-up.
    """
    import lightning as L

    spans: list[tuple[Took, Took]] = []

    class TakeTurns(L.Callback):
        """Runs a step of the plain loop after each batch of the training, and records the times of both."""

        def __init__(self) -> None:
            self.before: Took | None = None  # the time of the plain step
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
    trainer.fit(make_gpt(paces.parts()), batches(pairs, rows))
    plain.close()
    return spans[WARM_UP:]


def together() -> None:
    """Wait until all ranks have arrived."""
    if dist.is_initialized():
        dist.barrier()


def quiet() -> None:
    """Use one thread, and suppress the messages of Lightning."""
    torch.set_num_threads(1)
    hush()


def piped_rank(rank: int, pairs: int, by_units: bool = False) -> list[tuple[Took, Took]]:
    """Run the pairs of steps on one rank of a pipeline: the bare engine, and the strategy."""
    from lightning_pipes.engine import FailureWatch

    quiet()
    dist.init_process_group("gloo")
    # A separate prefix, because the strategy's watch would take the entries of this watch for entries of another rank.
    store = dist.PrefixStore("engine", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    watch = FailureWatch(store, rank)
    paces = Paces()
    plain = Plain(pairs, ROWS, paces).piped(rank, watch)
    found = in_turns(plain, paces, pairs, ROWS, devices=RANKS, strategy=make_strategy(by_units))
    watch.close()
    return found


def single_rank(rank: int, pairs: int) -> list[tuple[Took, Took]]:
    """Run the pairs of steps in one process without this package.

    A step has one micro-batch only, because the time of Lightning's loop does not depend on the length of a step.
    """
    quiet()
    few, paces = ROWS // MICROBATCHES, Paces()
    return in_turns(Plain(pairs, few, paces), paces, pairs, few, devices=1, strategy="single_device")


def user_rank(rank: int, steps: int) -> tuple[float, float]:
    """Run an ordinary training, and return the median seconds between two steps and the seconds of a step."""
    import lightning as L

    quiet()
    strategy = make_strategy(by_units=False)
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(make_gpt(gpt_parts(RANKS)), batches(steps, ROWS))
    record = strategy.report.record
    assert record.between is not None
    return record.between, record.displayed_timeline.makespan / 1e9


def calls_rank(rank: int, by_units: bool) -> float:
    """Return the calls of Python and C functions for each micro-batch, without messages, Lightning and the optimizer.

    The number is the same in every run, however busy the machine is.
    """
    import lightning as L

    calls = 0

    def notice(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call") and not any(part in frame.f_code.co_filename for part in NOT_COUNTED):
            calls += 1

    class Counter(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == COUNTED.start:
                sys.setprofile(notice)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == COUNTED.stop - 1:
                sys.setprofile(None)

    quiet()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=make_strategy(by_units),
        max_epochs=1,
        callbacks=[Counter()],
        limit_train_batches=COUNTED.stop,
        **QUIET,
    )
    trainer.fit(make_gpt(gpt_parts(RANKS)), batches(COUNTED.stop, ROWS))
    return calls / len(COUNTED) / MICROBATCHES


def seconds(spans: Sequence[Took]) -> float:
    """Return the seconds of a step, from the earliest start on any rank to the latest end."""
    return (max(took.end for took in spans) - min(took.start for took in spans)) / 1e9


def is_disturbed(pair: Sequence[tuple[Took, Took]]) -> bool:
    """Return whether either step of a pair was disturbed on any rank."""
    return any(1e9 * took.disturbed > DISTURBED * (took.end - took.start) for of_rank in pair for took in of_rank)


def explain_invalid(overheads: Sequence[float], pairs: int, step: float) -> str:
    """Return the reason why the differences are not a valid measurement, or an empty string if they are.

    Args:
        overheads: the differences of the pairs that count, in milliseconds.
        pairs: the number of all pairs.
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
    """Measure the pipeline and the single process, and print the results."""
    parser = make_parser(__doc__, "only 20 pairs")
    parser.add_argument("--pairs", type=int, default=200, help="the number of pairs of steps")
    options = parser.parse_args()
    pairs = 20 if options.quick else options.pairs
    print(f"{describe_machine()}, torch {torch.__version__}; {pairs} pairs of steps")
    keys: dict[str, float] = {}
    sides: list[tuple[str, Callable[..., Any], int]] = [
        ("pipeline", piped_rank, RANKS),
        ("units", partial(piped_rank, by_units=True), RANKS),
        ("one_process", single_rank, 1),
    ]
    for name, rank_main, ranks in sides:
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
        print(f"{name:12} plain loop {plain:.1f} ms a step, with Lightning {through:.1f} ms: ", end="")
        print(f"{overhead:.2f} ms more (quartiles {low:.2f} and {high:.2f})", flush=True)
        keys |= {f"{name}_overhead_ms": overhead, f"{name}_step_ms": plain}
    if {"pipeline_step_ms", "units_step_ms"} <= keys.keys():  # each is compared with the same bare engine
        by_layers, by_units = (
            1 + keys[f"{side}_overhead_ms"] / keys[f"{side}_step_ms"] for side in ("pipeline", "units")
        )
        keys["units_over_layers"] = by_units / by_layers
        print(f"a step by units takes {keys['units_over_layers']:.3f} of the time of a step by layers")
    if {"pipeline_step_ms", "one_process_step_ms"} <= keys.keys():
        keys["lightning_ms"] = keys["one_process_overhead_ms"]
        keys["ours_ms"] = keys["pipeline_overhead_ms"] - keys["lightning_ms"]
        found = f"Lightning takes {keys['lightning_ms']:.2f} ms and the strategy takes {keys['ours_ms']:.2f} ms"
        print(f"of a step in the pipeline, {found}")
    else:
        print("ours_ms can't be computed; repeat the measurement on a quiet machine with more cores than ranks")
    layers, units = (run_ranks(calls_rank, RANKS, by_units, timeout=600) for by_units in (False, True))
    keys["units_more_calls"] = max(more - less for less, more in zip(layers, units, strict=True))
    print(f"a stage by units makes {keys['units_more_calls']:.0f} more calls for each micro-batch than by layers")
    between, step = run_ranks(user_rank, RANKS, max(20, pairs // 2), timeout=600)[0]
    keys["user_between_ms"] = 1e3 * between
    print(f"in a user's training, {1e3 * between:.2f} ms pass between two steps of {1e3 * step:.1f} ms")
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
