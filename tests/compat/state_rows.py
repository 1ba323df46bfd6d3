"""Rows about the state of modules other than weights: modes, attributes, buffers, and values that layers store."""

from __future__ import annotations

from functools import partial

from tests.compat import layer_values as values
from tests.compat import state_modules as s
from tests.compat.registry import row

state = partial(row, "State")
state("layers set to eval() before fit", module=s.FrozenNorms, watch=s.modes)
state("a part of a layer and a module outside of the layers, set to eval() before fit", module=s.PartlyFrozen)

THREE = {"max_epochs": 3}
state("an attribute set in on_train_epoch_end, read before the layers", THREE, module=s.AnnealedByEpoch)
state("an attribute set from logged values, read before the layers", THREE, module=s.AnnealedByMetric)
state("an attribute set in on_validation_batch_end from values that steps keep", THREE, module=s.AnnealedByBatch)
state(
    "attributes of the module set by callbacks",
    lambda folder: {"callbacks": [s.SetsBeta()], "max_epochs": 3},
    module=s.KeepsLoss,
)
state("layers frozen and unfrozen in hooks", {"max_epochs": 4}, module=s.Thawing)
state("forward hooks registered in hooks", THREE, module=s.Hooked)
state("settings of layers, changed in hooks", THREE, module=s.LitConfig)
state("settings of layers, changed by the step after the layers", module=s.LitConfigBySteps)
state("counters of steps and samples, read in the next step", THREE, module=s.Counting)
state("running averages in attributes and buffers, read in the next step", THREE, module=s.Averaging)
state("sums and lists kept by training_step", THREE, module=s.Summing)
state(
    "the largest and smallest value, kept by training_step",
    THREE,
    module=s.Largest,
)
state(
    "values that are not a mean, sum or extreme over samples, kept by training_step",
    THREE,
    module=s.Spread,
    warned="sets self.spread",
    reason="they differ between micro-batches, and a warning names them",
)
state("auxiliary losses that layers leave in attributes, lists and buffers", module=s.Experts)
BUFFERED = {
    "": {},
    ", cut by units": {"module": ""},
    ", two stages on a rank": {"schedule": "hanayo", "schedule_args": {}},
}
for case, settings in BUFFERED.items():
    state(
        f"auxiliary losses that layers leave in buffers, recompute=True{case}",
        module=s.BufferedExperts,
        strategy={"recompute": True, **settings},
    )
state("auxiliary losses that layers add up and the step reads", module=s.TakesLosses)
state(
    "auxiliary losses that layers append to a list of the module",
    module=s.SharedLosses,
    refused_on={4: "which layer 0 (rank 3) and layer 1"},
    reason="only with two stages, because other stages have copies of the list; let layers return their losses",
)
state("activations that forward hooks collect", module=s.Collected)
CUTS = {2: [2], 4: [1, 2, 3]}
state("the same tensor twice between layers, changed in place", module=s.Aliased, cuts=CUTS)
state(
    "a tensor and a view of it between layers, changed in place",
    module=s.AliasedView,
    cuts=CUTS,
    refused="in place. It shares memory with another tensor",
    reason="stages have copies; return `x.clone()`, or do not change it in place",
)
state("layers that count their calls", THREE, module=s.WarmingUp)
state("numbers, strings and tensors that layers keep, read in hooks", module=values.ReadByHooks)
state(
    "numbers, strings and tensors that layers keep, read in hooks of a callback",
    lambda folder: {"callbacks": [values.ReadByCallback()], "max_epochs": 3},
    module=values.Kept,
)
state("lists that layers fill, read in hooks", THREE, module=values.ReadLists)
state("sums that layers keep, read in hooks", {"num_sanity_val_steps": 0}, module=values.ReadsSums)
state(
    "sums that layers keep, with an evaluation before training",
    module=values.ReadsSums,
    warned=".total was treated as a mean over samples in batches that were evaluated",
    reason="set num_sanity_val_steps=0",
)
state(
    "sums that layers keep in buffers, tensors, lists and dicts, in training and evaluation",
    {"num_sanity_val_steps": 0},
    module=values.Grows,
)
state(
    "sums over the latest batch, kept by layers and by the step, read in hooks",
    {**THREE, "num_sanity_val_steps": 0},
    module=values.BalancesLoads,
)
for shared in (False, True):
    for units in (False, True):
        state(
            "random generators of the module, used before and after the layers"
            f"{', in layers of several stages' * shared}{', by units' * units}",
            module=partial(s.OwnGenerators, shared),
            watch=s.drawn_next,
            strategy={"microbatches": 1, **({"module": ""} if units else {})},
            evaluate=True,
        )
UNCOMPARED = "remove check_loss=False, so that they are compared with a whole batch"
state(
    "sums that layers keep, with check_loss=False",
    module=values.ReadsSums,
    strategy={"check_loss": False},
    warned=".total is taken for a mean over samples",
    reason=UNCOMPARED,
)
state(
    "sums that the step keeps, with check_loss=False",
    module=s.SumsLosses,
    strategy={"check_loss": False},
    warned="self.total is taken for a mean over samples",
    reason=UNCOMPARED,
)
state(
    "values that are not a mean, sum or extreme over samples, kept by a layer",
    module=values.Deviations,
    warned=".spread to",
    reason="they differ between micro-batches, and a warning names them",
)
state(
    "large tensors that layers keep, read in hooks",
    module=values.ReadsLargeOutputs,
    refused="of layer",
    reason="a tensor of more than 64 KiB is not sent to ranks that may never read it",
)
for what in ("saved", "unsaved", "plain", "dict", "object"):
    for reads in (False, True):
        state(
            f"layers that count their calls in place: {what}{', read in hooks' * reads}",
            module=partial(values.CountsInPlace, what, reads),
        )
state(
    "attributes and buffers that steps set while batches overlap",
    THREE,
    module=s.Counting,
    strategy={"schedule": "pipedream", "schedule_args": {}},
    warned="Batches overlap with schedule 'pipedream'",
    reason="other ranks get them after a flush; set them in hooks",
)
