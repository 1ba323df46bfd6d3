"""Sentences about a difference: where it is, and why values of a pipeline are most likely others there."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.trainer.module.proxy import Layers
from lightning_pipes.trainer.verify.comparison import Difference
from lightning_pipes.trainer.verify.record import OUTSIDE, Phase

_CUT = "Ways out: microbatches=1, or code that treats each sample by itself"

REASONS = {
    Phase.BATCH: "the data are not the same: a sampler or data set draws numbers that depend on the process, or reads "
    "a file or stream that is open already",
    Phase.MODE: "a part of the module is in training mode here and in evaluation mode there, or the other way round: "
    "train() or eval() was called on some ranks only, or forgotten",
    Phase.FROZEN: "requires_grad was changed on some ranks only: by a hook that one rank runs, or between batches",
    Phase.OUTPUT: "the layer gets the same samples and gives something else: it looks at other samples of the batch, "
    f"reads an attribute that differs by rank, or draws random numbers that are not by sample. {_CUT}",
    Phase.LOSS: "the layers give the same, so the code after them makes the difference: a loss that is no mean over "
    "samples, an auxiliary loss that layers of other stages leave in an attribute, list or buffer, or samples that are "
    f"compared with each other. {_CUT}; let layers hand on with their output what the loss is made of",
    Phase.GRADIENT: "inputs and loss are the same, so something on the way back makes the difference: a hook on a "
    "parameter, tensor or module that runs for each micro-batch, a part of the loss that layers of other stages leave "
    "behind, on_after_backward, or gradients that were not cleared",
    Phase.STEP_GRADIENT: "the gradients of the batch are the same, so what changes them before the step makes the "
    "difference: clipping in optimizer_step or a hook by the norm of one stage's weights, or a hook that does not run "
    "on this rank. Use the Trainer's gradient_clip_val, or configure_gradient_clipping",
    Phase.SETTING: "a scheduler or hook changes the optimizer on some ranks only, or by a number that differs",
    Phase.WEIGHT: "the optimizer gets the same gradients, so what follows makes the difference: an optimizer that "
    "looks at all weights at once (a norm over all of them, several closures), a hook that changes weights after "
    "the step on some ranks only, or weights that are stepped without a gradient, as after zero_grad(set_to_none="
    "False)",
    Phase.BUFFER: "the layers' buffers are updated for each micro-batch, or on some ranks only, as running statistics "
    f"of BatchNorm are. {_CUT}",
    Phase.LOG: "what is logged is no mean over samples, or a hook logs what one rank knows. Log it with reduce_fx, or "
    "as a torchmetrics object",
}


def likely_reason(difference: Difference, notes: Sequence[str], layers: Layers) -> str:
    """Return what most likely makes the difference.

    Args:
        notes: of the reference about the batch: the random operations that are not by sample.
        layers: of the whole module.
    """
    phase = difference.key.phase
    if notes and phase not in (Phase.BATCH, Phase.MODE, Phase.FROZEN, Phase.SETTING):
        return (
            f"the step {', '.join(notes[:3])} once for a whole batch, and every micro-batch draws numbers of its own; "
            "let each sample have its own random numbers"
        )
    if phase is Phase.INPUT:
        return _reason_of_input(difference, layers)
    return REASONS[phase]


def _reason_of_input(difference: Difference, layers: Layers) -> str:
    layer = difference.key.layer
    if layer > 0:
        norm = next(
            (part for part in layers[layer - 1].modules() if isinstance(part, BatchNorm) and part.training), None
        )
        if norm is not None:
            return f"layer {layer - 1} holds a {type(norm).__name__}, which looks at other samples of the batch. {_CUT}"
        return (
            f"layer {layer - 1} gets the same and gives something else: it looks at other samples of the batch, "
            "draws random numbers that are not by sample, reads an attribute that a hook, the step or "
            f"another layer has set on another rank only, or is changed in place by others. {_CUT}"
        )
    reasons = []
    if difference.several:
        reasons.append(
            "code before the layers looks at other samples of the batch (a mean over samples, sorting, arange(len(x))) "
            "or at random numbers that are not by sample, and runs for each micro-batch"
        )
    if difference.number:
        reasons.append(
            "it reads an attribute, buffer or list that the last batch, a hook or the code after the layers has set, "
            "which the first stage does not see"
        )
    return f"{', or '.join(reasons) or 'code before the layers depends on the process'}. {_CUT}"


def place_of(difference: Difference) -> str:
    """Return where the value is, for a sentence."""
    phase, layer, name = difference.key
    inside = "" if layer == OUTSIDE else f"layer {layer}, "
    return {
        Phase.BATCH: "what training_step gets",
        Phase.MODE: f"{inside}the mode of {name or 'the module'}",
        Phase.FROZEN: f"{inside}whether {name} is frozen",
        Phase.INPUT: f"what goes into layer {layer} ({name})",
        Phase.OUTPUT: f"what layer {layer} gives ({name})",
        Phase.LOSS: "the loss" if name == "loss" else f"what training_step returns as {name!r}",
        Phase.GRADIENT: f"{inside}the gradient of {name} after backward",
        Phase.STEP_GRADIENT: f"{inside}the gradient of {name} that the optimizer gets",
        Phase.SETTING: name,
        Phase.WEIGHT: f"{inside}the weight {name} after the batch",
        Phase.BUFFER: f"{inside}the buffer {name} after the batch",
        Phase.LOG: f"the logged value {name}",
    }[phase]


def describe_difference(difference: Difference, notes: Sequence[str], layers: Layers) -> str:
    """Return what differs, where, and the likely reason."""
    where = f"on rank {difference.rank}" + (f" ({difference.where})" if difference.where else "")
    return (
        f"batch {difference.number} is not what one plain process trains. First differs {place_of(difference)}, "
        f"{where}: {difference.ours} here, {difference.theirs} in one process. Likely reason: "
        f"{likely_reason(difference, notes, layers)}"
    )
