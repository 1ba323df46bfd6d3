"""Random modules with overlapping batches: supernets, and streams that train with old weights."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from tests.fuzz.modules import UNIQUE, Made
from tests.fuzz.moving import slow_neighbour
from tests.fuzz.pieces import MAKERS, Base, Piece, is_off

KINDS = (
    *("value", "value", "value", "collected", "around", "logs", "gradients", "step overridden", "zero grad", "groups"),
    *("schedules rate", "weights", "average", "options", "metric"),
)
"""Functions that make pieces without the numbers of layers."""

LEFT_OUT = {
    r"around:(inlet|outlet|scale)": "parameters outside of the layers are refused",
    r"^logs:.*:outputs:": "hooks get the latest result that is known",
    r"around:residual": "a supernet returns what a loss is made of, which is narrower than what enters",
    r"groups:layers$": "a supernet has no head",
    r"weights:.*:(one layer|init|zeros|head|fill|copy|random|reset)": "a choice block has no weights of its own",
    r"value:layer number": "a choice block reads no numbers",
    r"value:.*:(outputs|metric|val metric):": "hooks get the latest result that is known",
    r"value:.*:on_before_backward:loss": "hooks get the latest result that is known",
    r"collected:.*on_train_batch_end": "steps fill the list late",
    r"rate:plateau": "logs of steps come late",
    r"^metric": "what is known of it at a validation depends on the batches whose logs have come",
    r"steps:|val interval:": "they end a window in the middle of an epoch, as tests/strategies/csp has it",
}
"""Causes that do not occur in supernets, as regular expressions, with the reasons."""

MAY_REFUSE = r"^(gradients|optimizer_step|zero_grad|weights|clips|accumulates)"
"""Causes with which csp may end in an error, because they need values of all stages or of unfinished batches."""
MAY_WARN = (
    (r"^average", "reads layers while batches are in flight"),
    (r"^value:.*:(step_begin|step_end):|^collected:step_end", "Batches overlap"),
    (r"^value:.*:(step_begin|step_end|on_after_backward|on_before_optimizer_step):", "before the optimizer's step"),
)
"""Causes with which csp may train other weights, and the warning for each of them."""


def supernet_module(seed: int, ranks: int = 2, pieces_at_most: int = 6) -> Made:
    """Return the random supernet of a seed."""
    rng = random.Random(f"supernet {seed}")
    base = Base(
        place="supernet",
        block=rng.choice(("tanh", "residual", "layer norm")),
        loss=rng.choice(("cross entropy", "square", "smooth")),
        optimizer=rng.choice(("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad")),
        rows=rng.choice((46, 48, 33)),
        size=rng.choice((8, 6)),
        schedule="csp",
        schedule_args=rng.choice(({}, {}, {"balanced": True})),
        microbatches=rng.choice((1, 2, 4)),
        ranks=ranks,
        epochs=rng.choice((1, 2)),
        shared=rng.choice(("per_choice", "per_choice", "frozen", "sequential")),
    )
    wanted = min(pieces_at_most, rng.choice((1, 2, 2, 3, 3, 4)))
    pieces: list[Piece] = []
    for attempt in range(60):
        if len(pieces) == wanted:
            break
        new = MAKERS[rng.choice(KINDS)][0](rng, base, attempt)
        taken = {key for p in pieces for key in (*p.trainer, *p.only, *(UNIQUE & p.code.keys()))}
        clash = bool(taken & {*new.trainer, *new.only, *(UNIQUE & new.code.keys())})
        clash |= any(new.kind in p.excludes or p.kind in new.excludes for p in pieces)
        new = _as_with_csp(new)
        odd = any(p.refused or p.warned for p in pieces) and bool(new.refused or new.warned)
        if not (clash or odd or is_off(new.cause) or any(re.search(each, new.cause) for each in LEFT_OUT)):
            pieces.append(new)
    return Made(seed, base, tuple(pieces))


def _as_with_csp(piece: Piece) -> Piece:
    """Return the piece with the errors and warnings that csp may give for it."""
    refused = "." if re.search(MAY_REFUSE, piece.cause) else piece.refused
    if re.search(r"^value:.*:(step_begin|step_end|on_after_backward|on_before_optimizer_step):", piece.cause):
        refused = "the optimizers of one pipeline differ"  # if the value sets learning rates
    warned = [text for cause, text in MAY_WARN if re.search(cause, piece.cause)]
    if any(
        place.endswith("on_before_optimizer_step") and "['lr'] =" in str(code) for place, code in piece.code.items()
    ):
        warned.append("as on_before_optimizer_step, sets .* lr from")
    warned = "|".join(warned) or piece.warned
    return replace(piece, refused=refused, warned=warned)


STREAM_CUT = (4,)
"""The first layers of later stages of a stream."""
LEFT_OUT_OF_STREAMS = {
    r"gradients:.*:(norm|norm by hand|of groups)": "each stage clips by the norm of its own layers",
    r"^(zero_grad|optimizer_step|clips|accumulates)": "stages are at different batches",
}
"""Causes that do not occur in streams, in addition to `LEFT_OUT`, with the reasons."""


def streamed_module(seed: int, ranks: int = 2, pieces_at_most: int = 6) -> Made:
    """Return the module of a seed with overlapping batches, which use weights that miss the latest steps."""
    made = supernet_module(seed, ranks, pieces_at_most)
    rng = random.Random(f"stream {seed}")
    schedule = rng.choice(("pipedream", "dynpipe"))
    base = replace(made.base, place="headless", schedule=schedule, schedule_args={}, microbatches=rng.choice((1, 2, 4)))
    kept = [each for each in made.pieces if not any(re.search(cause, each.cause) for cause in LEFT_OUT_OF_STREAMS)]
    return Made(seed, base, (*kept, Piece("partition:fixed", strategy={"partition": list(STREAM_CUT)})))


def moving_stream(seed: int, ranks: int = 2, pieces_at_most: int = 6) -> Made:
    """Return the stream of a seed, with a planner that moves layers away from a slow rank."""
    made = streamed_module(seed, ranks, pieces_at_most)
    rng = random.Random(f"moving stream {seed}")
    planner = {"every": 2, "windows": 1, "gain": 0.0}
    base = replace(made.base, schedule="dynpipe", schedule_args=planner, microbatches=1, epochs=2, rows=48, size=6)
    kept = tuple(piece for piece in made.pieces if piece.cause != "average:in a dict")
    neighbour = slow_neighbour(rng, ranks, relocation=rng.choice(("blocking", "overlapped")))
    return replace(made, base=base, pieces=(*kept, neighbour))
