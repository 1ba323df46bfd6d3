"""The choice of microbatches_by="auto" between micro-batches of samples and of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.data.batches import find_block_masks, rows_of
from lightning_pipes.trainer.data.sample import first_batch
from lightning_pipes.trainer.data.token_cut import SAMPLES, TokenCounts, TokenCutter
from lightning_pipes.trainer.plan.settings import AUTO
from lightning_pipes.trainer.results.loss_weights import LossWeights
from lightning_pipes.trainer.setup.module_setup import ModuleSetup, SetupContext
from lightning_pipes.trainer.verify.verifier import find_dropout


def find_sorting_obstacle(context: SetupContext) -> str:
    """Return the reason why sequences can't be sorted into micro-batches by length, or an empty text.

    The result does not depend on the data. It is the same on all ranks.
    """
    settings, module = context.settings, context.module
    if context.is_manual:
        return "manual optimization trains each batch as one micro-batch"
    if found := context.request.sorting_obstacle or settings.sorting_obstacle:
        return found
    if not LossWeights.are_needed(module, settings.check_loss):
        return "check_loss=False leaves out the comparison that shows how the losses of micro-batches are weighted"
    if settings.verify.batches and find_dropout(module) is not None:
        return "verify compares active dropout only with micro-batches of samples"
    return ""


def propose_sorting(context: SetupContext) -> tuple[SetupContext, str]:
    """Decide whether sequences are sorted, if microbatches_by="auto". Collective.

    Returns:
        The context, and the reason why sequences are to be sorted. If they are, the planner may only choose equal cuts.
        Otherwise, the context has micro-batches by samples, or is unchanged, and the reason is empty.
    """
    if context.settings.microbatches_by != AUTO:
        return context, ""
    shares, obstacle = _examine_batch(context) if context.is_fitting else ("", "there is no training")
    if obstacle:
        return _by_samples(context, obstacle), ""
    return replace(context, request=replace(context.request, equal_cuts=True)), shares


def settle_microbatches(context: SetupContext, setup: ModuleSetup, reason: str) -> SetupContext:
    """Return the context with micro-batches by samples if the module's cut needs them, and otherwise the same context.

    If microbatches_by is still "auto" then, sequences are sorted.

    Args:
        context: the context.
        setup: the setup, which has found out whether the loss of the module needs whole batches.
        reason: the reason why sequences are to be sorted, as `propose_sorting` returns it.
    """
    if reason and setup.ends_whole:
        return _by_samples(context, "the loss of training_step is computed once for all samples of a batch")
    if reason:
        rank_zero_info(f"microbatches_by='auto' divides batches into micro-batches by tokens: {reason}")
    return context


def _by_samples(context: SetupContext, reason: str) -> SetupContext:
    if context.is_fitting:
        rank_zero_info(f"microbatches_by='auto' divides batches into micro-batches by samples: {reason}")
    without = replace(context.request, equal_cuts=False)
    return replace(context, request=without, settings=replace(context.settings, microbatches_by=SAMPLES))


def _examine_batch(context: SetupContext) -> tuple[str, str]:
    """Return the share of padding, and the reason why sequences are not sorted, if there is one. Equal on all ranks."""
    obstacle = find_sorting_obstacle(context)
    if obstacle or context.trainer.limit_train_batches == 0:
        return "", obstacle or "there are no training batches"
    counts, reason = None, ""
    data = private.run_data(context.trainer)  # on all ranks: it may draw random numbers
    if private.has_delayed_training_data(context.trainer):
        private.forget_run_data(context.trainer)
    try:
        counts = _count_tokens(context, data)
    except Exception as error:  # of the user's code; training raises it with more context
        reason = f"no batch could be examined: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    found, reasons = zip(*context.ranks.control.all_gather((counts, reason)), strict=True)
    if any(reasons):
        return "", next(filter(None, reasons))
    known = [each for each in found if each is not None]
    if not known:
        return "", "the first batch does not clearly show sequences of different lengths, or has a BlockMask"
    total = TokenCounts(*map(sum, zip(*known, strict=True)))
    now, then = total.shares
    shares = f"{now:.0%} of the tokens in the first batch are padding, and {then:.0%} if sequences are sorted by length"
    return shares, "" if total.is_worth_sorting else f"{shares}, which saves too little"


def _count_tokens(context: SetupContext, data: Any) -> TokenCounts | None:
    """Return the numbers of tokens of the first batch. None if it does not show lengths, or if it can't be cropped."""
    request, device = context.request, context.ranks.device
    with forked_rng(device):
        batch = private.on_device(context.trainer, first_batch(data, device))
    rows, ranks = rows_of(batch), context.ranks.grid.n_planned
    if request.microbatches is None and request.chooses:
        pieces = 2 * ranks
    else:
        pieces = -(-rows // request.sample_rows(rows, ranks))
    if find_block_masks(batch):
        return None
    stages = len(request.schedule.place_stages(ranks))
    return TokenCutter(stages).count_tokens(batch, rows, even_spans(rows, min(rows, pieces)))
