"""Rows of the compatibility table about supernets, which are trained with schedule "csp"."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.compat import supernet_modules as nets
from tests.compat.registry import ROWS, row
from tests.compat.runs import Found
from tests.trainer.lit import differences


def equal_weights(ranks: list[Found], plain: Found) -> None:
    assert not differences(ranks[0]["weights"], plain["weights"], 1e-10, "weights")


supernet = partial(
    row,
    "Supernets",
    loaders=nets.subnet_loaders,
    differs=frozenset({"outputs"}),  # hooks get the outputs of the latest subnet that are available
)
CSP: dict[str, Any] = {"schedule": "csp", "schedule_args": {}}
BALANCED: dict[str, Any] = {"schedule": "csp", "schedule_args": {"balanced": True}}
for name, kind, more in (
    ("one subnet in each batch", nets.LitSupernet, {}),
    ("gradients changed in on_after_backward, on_before_optimizer_step, clipping", nets.ScalesGradients, {}),
    (
        "gradients changed in a callback's on_after_backward",
        nets.LitSupernet,
        {"callbacks": [nets.ScalesInACallback()]},
    ),
    ("weights clamped by a hook of the optimizer", nets.ClampsInTheOptimizer, {}),
    ("optimizer.state of a batch's own weights, changed in on_before_optimizer_step", nets.DecaysOwnStates, {}),
):
    supernet(name, more, module=kind, strategy=CSP)
    supernet(f"{name}; balanced", more, module=kind, strategy=BALANCED)
for name, kind in (
    ("optimizer_step that sets learning rates, optimizer_zero_grad", nets.SetsRates),
    ("attributes, dicts, lists and buffers set in on_train_batch_start", nets.AnnealsInHooks),
    ("weights clamped in on_train_epoch_start", nets.ClampsAtEpochs),
    ("requires_grad_ in on_train_epoch_start", nets.FreezesAtEpochs),
):
    supernet(name, module=kind, strategy=CSP)
USE_STEP_HOOK = "earlier batches are still in progress; use optimizer.register_step_post_hook or on_train_epoch_start"
BY_ITSELF = "change the states of a batch's own weights, in on_before_optimizer_step"
CHANGED = "other batches that use it are under way"
for name, kind, refused, reason in (
    (
        "optimizer_step that skips steps",
        nets.LeavesStepsOut,
        "outside of optimizer.step(closure=...)",
        "each stage steps as soon as it has the gradients of a batch",
    ),
    (
        "optimizer_zero_grad(set_to_none=False)",
        nets.ZeroesGradients,
        "leaves gradients, or zeros in their place",
        "layers that a batch does not use would be stepped",
    ),
    (
        "an optimizer that decays weights without gradients",
        nets.DecaysAll,
        "changes parameters that have no gradients",
        "a batch only steps the layers that it uses; skip parameters without gradients",
    ),
    ("weights clamped in on_train_batch_end", nets.ClampsWeights, CHANGED, USE_STEP_HOOK),
    ("p.data clamped in on_train_batch_end", nets.ClampsData, CHANGED, USE_STEP_HOOK),
    ("weights clamped in on_before_optimizer_step", nets.ClampsBeforeSteps, CHANGED, USE_STEP_HOOK),
    ("requires_grad_ in on_train_batch_start", nets.FreezesLater, CHANGED, "use on_train_epoch_start"),
    ("layers_of_batch that leaves out a layer", nets.LeavesOut, "does not name the layer", "name every layer"),
    (
        "optimizer.state counted in on_train_batch_end",
        nets.CountsStates,
        "the layers of other ranks that have states depend on",
        BY_ITSELF,
    ),
    (
        "optimizer.state counted in on_train_epoch_start",
        nets.CountsAtEpochs,
        "the layers of other ranks that have states depend on",
        BY_ITSELF,
    ),
    (
        "optimizer.state of all weights, read in a hook",
        nets.LooksForStates,
        "the layers of other ranks that have states depend on",
        BY_ITSELF,
    ),
    (
        "optimizer.state changed in on_train_batch_end",
        nets.DecaysStates,
        "the state belongs to an earlier batch",
        BY_ITSELF,
    ),
    (
        "a custom norm over optimizer.param_groups, subnets",
        nets.NormOfGroups,
        "takes the value of",
        "clip by value",
    ),
    ("subnets drawn by each rank separately", nets.DrawsByRank, "use different layers", "use one seed"),
    ("a stream with a different seed on each rank", nets.StreamByRank, "use different layers", "use one seed"),
):
    more = {} if kind is not nets.StreamByRank else {"loaders": dict}
    supernet(name, module=kind, strategy=CSP, refused=refused, reason=reason, **more)
for name in ("p.data clamped in on_train_batch_end", "a stream with a different seed on each rank"):
    ROWS[f"{name}; balanced"] = replace(ROWS[name], name=f"{name}; balanced", strategy=BALANCED)
supernet(
    "no layers_of_batch",
    module=nets.SaysNothing,
    strategy=CSP,
    warned="has no layers_of_batch to name them",
    reason="equal results, but one batch after another",
    check=equal_weights,
)
supernet(
    "an attribute set in on_before_optimizer_step",
    module=nets.SetsBeforeSteps,
    strategy=CSP,
    warned="that runs before the optimizer's step",
    reason="set it in on_train_batch_start",
)
supernet(
    "candidates that count their calls",
    module=nets.LayersCount,
    strategy=CSP,
    warned="which it keeps from one micro-batch to the next",
    reason="each micro-batch is counted",
)
supernet(
    "an average of weights in on_train_batch_end",
    module=nets.AveragesWeights,
    strategy=CSP,
    warned="reads layers while batches are in flight",
    reason="average them in on_train_epoch_end",
)
supernet(
    "a list of steps, read in on_train_epoch_end",
    module=nets.CountsSteps,
    strategy={**CSP, "microbatches": 1},
)
