"""Measurement of sequences that are longer than the sequences that were measured before training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.engine.compute.profiler import wait_for_device
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import Span
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer.data.length_cost import LengthCost
from lightning_pipes.trainer.data.token_cut import TokenCut, TokenCutter
from lightning_pipes.trainer.loop.run import PipelineRun, StageListener
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher

N_MEASURED_BATCHES = 3
"""The number of batches with longer sequences from which the cost is determined."""
MAX_MEASUREMENTS = 3
"""The largest number of times that a run determines the cost."""
MIN_LONGER = 1.1
"""The length of the longest sequence, relative to the longest sequence that was measured, from which it is measured."""
MIN_TOKENS_SHARE = 0.25
"""The smallest number of tokens of a micro-batch that is measured, relative to the mean of the micro-batches.

A smaller micro-batch mostly takes the time that every call takes.
"""


class ForwardClock(StageListener):
    """Measures the forwards of the micro-batches of single batches on this rank.

    Attributes:
        seconds: the seconds of each micro-batch of the latest measured batch.
    """

    def __init__(self) -> None:
        self.seconds: dict[Span, float] = {}
        self._number: int | None = None
        self._begun = 0.0

    def start(self, number: int) -> None:
        """Measure the batch with this number."""
        self._number, self.seconds = number, defaultdict(float)

    def stop(self) -> None:
        """Measure no forward until the next call of `start`."""
        self._number = None

    def before_forward(self, stage: Stage, item: Item, span: Span) -> None:
        """Record the beginning of a forward."""
        if self._is_measured(stage, item):
            wait_for_device(stage.device)
            self._begun = read_seconds()

    def after_forward(self, stage: Stage, item: Item, span: Span) -> None:
        """Add the duration of a forward."""
        if self._is_measured(stage, item):
            wait_for_device(stage.device)
            self.seconds[span] += read_seconds() - self._begun

    def before_repetition(self) -> None:
        """Stop, because the next forwards of the batch are additional."""
        self.stop()

    def _is_measured(self, stage: Stage, item: Item) -> bool:
        return item.training and item.number == self._number and not stage.recomputing


class LengthTimes(Watcher):
    """Measures micro-batches with longer sequences, and corrects the cost of sequences.

    Every rank measures the forwards of its stages, and the ranks of a pipeline sum their times. Replicas have batches
    of their own, so each of them measures and uses its own cost.

    Args:
        run: the run.
        cutter: sorts the sequences of the run.
    """

    def __init__(self, run: PipelineRun, cutter: TokenCutter) -> None:
        self._run, self._cutter, self._clock = run, cutter, ForwardClock()
        self._measurements_left = MAX_MEASUREMENTS
        self._batches: list[tuple[list[tuple[Span, int]], Mapping[Span, float]]] = []
        """For each measured batch, its measured micro-batches and their lengths, and the seconds on this rank."""
        run.listeners.append(self._clock)

    @staticmethod
    def can_measure(run: PipelineRun) -> bool:
        """Return whether the cost was measured, and the ranks of a run can measure it again. The same on all ranks.

        If batches overlap, the ranks are at different batches, and siblings of a job array share the devices. With
        tensor parallelism, several pipelines have to cut the same batches in the same way.
        """
        is_alone = not run.is_asynchronous and run.connections.turns is None
        is_measured = run.token_cutter is not None and run.token_cutter.cost.longest > 0
        return is_measured and is_alone and run.local_layers.holdings.grid.shards == 1

    def around_batch(self, step: TrainingStep) -> None:
        """Begin to measure the batch if it contains longer sequences."""
        cut, longest = step.token_cut, self._cutter.cost.longest
        if not self._measurements_left or cut is None:
            return
        measured = select_microbatches(cut)
        lengths = [length for _, length in measured]
        if min(lengths) <= longest and max(lengths) >= MIN_LONGER * longest:
            self._clock.start(step.number)
            self._batches.append((measured, self._clock.seconds))

    def after_batch(self, step: TrainingStep) -> None:
        """Correct the cost after the last of the batches that are measured together. Collective after that batch."""
        self._clock.stop()
        if len(self._batches) < N_MEASURED_BATCHES:
            return
        own = [[seconds[span] for span, _ in measured] for measured, seconds in self._batches]
        of_ranks = self._run.control.all_gather(own)
        times = [
            (length, sum(ranks[n][place] for ranks in of_ranks) / (span.rows * length))
            for n, (measured, _) in enumerate(self._batches)
            for place, (span, length) in enumerate(measured)
        ]
        self._batches.clear()
        self._measurements_left -= 1
        before, self._cutter.cost = self._cutter.cost, self._cutter.cost.with_longer(times)
        rank_zero_info(describe_change(before, self._cutter.cost))


def select_microbatches(cut: TokenCut) -> list[tuple[Span, int]]:
    """Return the micro-batches of a batch that have enough tokens to be measured, and their lengths."""
    tokens = {span: span.rows * length for span, length in cut.widths.items()}
    least = MIN_TOKENS_SHARE * fmean(tokens.values())
    return [(span, length) for span, length in cut.widths.items() if tokens[span] >= least]


def describe_change(before: LengthCost, after: LengthCost) -> str:
    """Return a text about a cost that was measured again."""
    return (
        f"Sequences of up to {after.longest} tokens were measured in {N_MEASURED_BATCHES} batches, and until then "
        f"sequences of up to {before.longest}. In a sequence of n tokens, a token now counts as {_formula(after)}, and "
        f"no longer as {_formula(before)}"
    )


def _formula(cost: LengthCost) -> str:
    return f"1 + {cost.growth:.3g} n"
