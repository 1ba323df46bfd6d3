"""Measurement of the padding in the first batches, for the advice to sort sequences into micro-batches by length."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.ir import Kind
from lightning_pipes.trainer.data.token_cut import TokenCounts, TokenCutter
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher

N_MEASURED_BATCHES = 4


class Padding(Watcher):
    """Counts the tokens of the first batches of a run that does not sort sequences by length."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        plan, _ = run.plans.for_rows(run.plans.trial_rows)
        self._cutter = TokenCutter(plan.n_stages, run.plans.least_rows)
        self._counts = TokenCounts()
        self._batches_left = N_MEASURED_BATCHES

    def around_batch(self, step: TrainingStep) -> None:
        """Count the tokens of one of the first batches, and log the advice after the last of them."""
        if not self._batches_left:
            return
        self._batches_left -= 1
        run = self._run
        spans = [span for span in run.engine.plan.spans(Kind.F, 0) if span.start < step.rows]
        try:
            found = self._cutter.count_tokens(step.batch, step.rows, spans)
        except Exception:  # tensors of unusual kinds, which training may support
            self._batches_left = 0
            return
        if found is not None:
            self._counts = TokenCounts(*(a + b for a, b in zip(self._counts, found, strict=True)))
            run.padding_text = describe_padding(self._counts)
        if not self._batches_left and run.padding_text and run.connections.n_siblings == 1:
            rank_zero_info(run.padding_text)


def describe_padding(counts: TokenCounts) -> str:
    """Return the advice to sort sequences, or an empty text if it would save too little."""
    now, then = counts.shares
    if not counts.is_worth_sorting:
        return ""
    fewer = 1 - counts.cropped / counts.padded
    return (
        f"{now:.0%} of the tokens in the first batches are padding. With microbatches_by='tokens' or 'auto', "
        f"{then:.0%} would be padding, and stages would compute {fewer:.0%} fewer tokens. "
        "No schedule sets this automatically"
    )
