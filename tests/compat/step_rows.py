"""Rows about the values that steps log and return, gradients within steps, and parts of batches."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.compat import step_modules as s
from tests.compat.registry import batches, row
from tests.compat.runs import Found
from tests.trainer.lit import data


def quiet_about_training(ranks: list[Found]) -> None:
    """Assert that no rank warns that its training differs from one process."""
    assert [text for found in ranks for text in found["warnings"] if "differ" in text or "mix" in text] == []


def warned_on_rank_0(ranks: list[Found], what: str) -> None:
    """Assert that the warning appears in the output of rank 0 only, even if another rank gave it."""
    assert [any(what in text for text in found["warnings"]) for found in ranks] == [True] + [False] * (len(ranks) - 1)


steps = partial(row, "Steps")
BY_UNITS = {"module": "", "microbatches": 3}
for where, strategy in (("", {}), (", by units", BY_UNITS)):
    steps(
        f"self.log of constants, numbers of samples, sums and means, by each reduce_fx{where}",
        module=s.LogsReduced,
        strategy=strategy,
    )
    steps(
        f"self.log of values that are not a mean, sum or extreme over samples{where}",
        module=s.LogsSpread,
        strategy=strategy,
        warned="so they differ from one process: outputs['most'], outputs['sorted'], self.log('spread')",
        reason="a warning names the values",
    )
    steps(
        f"numbers, strings, counts, shapes and lists in the dict that training_step returns{where}",
        module=s.ReturnsNumbers,
        strategy=strategy,
    )
steps(
    "self.log of a number that is 0 in the first batches",
    module=s.LogsLater,
    warned="self.log('events') of LogsLater.training_step was 0 in all batches that were compared",
    reason="a warning names the value in the first batch in which it is not 0",
)
LAST = {2: [3], 4: [1, 2, 3]}
steps("auxiliary losses that layers pass along, for each sample", module=partial(s.PassesLosses, True))
steps(
    "auxiliary losses that layers pass along, from several samples",
    module=partial(s.PassesLosses, False),
    strategy={"module": "model"},
    warned="computes something from several samples together",
)
steps("an auxiliary loss in an attribute, for each sample", module=partial(s.LeavesLosses, True), cuts=LAST)
steps(
    "an auxiliary loss in an attribute, from several samples",
    module=partial(s.LeavesLosses, False),
    cuts=LAST,
    warned=" computes .loss, which it leaves there, from several samples together",
)
tables = partial(batches, DataLoader(data(), batch_size=3, collate_fn=s.with_table, drop_last=True))
cut = "should be a buffer of the module"
steps("class weights in the batch, as many as samples", loaders=tables, module=s.WeighsClasses, refused=cut)
steps(
    "a table in the batch with as many rows as samples, read before the layers",
    loaders=tables,
    module=s.LooksUpBefore,
    refused=cut,
    slow=True,
)
steps("an error of training_step after the layers", module=s.FailsByItself, raises="IndexError: no size fits the shape")

for what, make, text in (
    ("a string", lambda loss: "a string", "MisconfigurationException: In automatic optimization, `training_step` must"),
    ("a dict without a loss", lambda loss: {"other": loss}, "the 'loss' key needs to be present"),
    ("a loss without a graph", lambda loss: loss.detach(), "element 0 of tensors does not require grad"),
    (
        "a loss that is not a scalar",
        lambda loss: loss * torch.ones(2),
        "grad can be implicitly created only for scalar",
    ),
):
    steps(f"training_step returns {what}", module=partial(s.ReturnsOdd, make), raises=text, slow=what != "a string")

steps("evaluation steps that do not call the layers", module=s.WithoutLayers, evaluate=True)
steps("a copied Trainer", then=s.fit_by_a_copy)
steps(
    "storage_options of save_checkpoint",
    lambda folder: {"plugins": [s.Storage()]},
    then=s.save_with_options,
    watch=lambda trainer, folder: trainer.strategy.checkpoint_io.options if trainer.is_global_zero else None,
)

gap = "computes a gradient of the output of self.model(...)"
steps("autograd.grad through the layers, allow_unused=True", module=s.PenalisesUnused, refused=gap)
steps("autograd.grad through the layers and a skip around them", slow=True, module=s.PenalisesAround, refused=gap)
steps(
    "autograd.grad with respect to weights kept in a list",
    slow=True,
    module=s.PenalisesKeptWeights,
    refused="takes a gradient of, or by,",
)
steps("autograd.grad with respect to the output of the layers", module=s.PenalisesOutput)
steps("autograd.grad before the layers", module=s.PenalisesBefore)
steps("backward() in training_step", slow=True, module=s.BackwardInStep, refused=gap)
steps(
    "autograd.grad through the layers in validation_step",
    slow=True,
    module=s.GradInValidation,
    refused="validation_step computes",
)

by = lambda use: type("Remembered", (s.Remembered,), {"use": use})  # noqa: E731
steps("optimizer.state.values() in a hook, a norm of all", module=by("norm"), refused="an optimizer's 'exp_avg' of")
steps(
    "optimizer.state_dict() in a hook, a norm of all",
    slow=True,
    module=by("dict"),
    refused="an optimizer's 'exp_avg' of",
)
steps(
    "optimizer.state in a hook, torch's norm of all",
    slow=True,
    module=by("total"),
    refused="takes a norm of an optimizer's",
)
steps("optimizer.state in a hook, counted", module=by("number"))
steps("optimizer.state in a hook, each changed", module=by("scaled"))
steps("optimizer.state in a hook, cleared", module=by("cleared"))
steps("optimizer.state in a hook, replaced", module=by("replaced"))
steps(
    "weights of classes that validation sets",
    module=s.WeighsByMistakes,
    warned="returns a loss that is not a mean over samples",
    reason="return their weight from `microbatch_weight(batch)`",
)
steps(
    "mixtures of random samples, made by the step",
    module=s.MixesSamples,
    warned="training_step computes what enters self.model from several samples together",
    reason="mix them in on_after_batch_transfer, which receives all samples",
    check=lambda ranks, plain: warned_on_rank_0(ranks, "what enters self.model"),
)
steps(
    "a module cut by units: a loss that compares samples with each other",
    module=s.Contrasts,
    strategy={"module": ""},
    reason="its loss is computed once for all samples, as with loss='batch'",
)
for what, module, settings, refused in (
    ("a step that takes another path on one rank", s.TakesOtherWay, {}, ["it called neg as unit 0 at"] * 2),
    (
        "the address of a weight, as for code in C++",
        s.ReadsMemory,
        {},
        ["the step reads the memory of a tensor at"] * 2,
    ),
    (
        "a border in a checkpoint",
        s.Checkpointed,
        {"partition": ["model.4"]},
        ["It lies in a checkpoint", "makes 2 stages, and the run has 4"],
    ),
):
    on_2, on_4 = refused
    steps(f"{what}, by units", module=module, strategy={"module": "", **settings}, refused_on={2: on_2, 4: on_4})

tokens = lambda rows, size: DataLoader(data(rows, tokens=True), batch_size=size)  # noqa: E731
decodes = partial(
    steps, loaders=lambda: batches(tokens(22, 8), tokens(13, 5)), evaluate_on=lambda: tokens(13, 5), evaluate=True
)
decodes("greedy decoding in validation_step and predict_step", module=partial(s.Generates, nn.Sequential))
decodes("greedy decoding, layers in a loop", module=partial(s.Generates, nn.ModuleList))
decodes("greedy decoding, by units", module=partial(s.Generates, nn.ModuleList), strategy={"module": ""})
decodes("greedy decoding, layers that keep keys and values", module=partial(s.Generates, nn.Sequential, True))

for how, joined in (("called three times", False), ("called once with all inputs", True)):
    for sizes, length, size in (("equally many unlabeled samples", 46, 8), ("more unlabeled samples", 50, 24)):
        steps(
            f"a CombinedLoader with {sizes}, layers {how}",
            module=partial(s.SemiSupervised, joined),
            loaders=partial(s.two_loaders, length, size),
            check=lambda ranks, plain: quiet_about_training(ranks),
        )

in_place = partial(steps, evaluate=True, check=lambda ranks, plain: quiet_about_training(ranks))
in_place("a first layer that changes its batch in place, before the loss", module=partial(s.ChangesInput, False))
in_place(
    "a first layer that changes its input in place, with gradients",
    module=partial(s.ChangesInput, True),
    strategy={"recompute": True},
)

changes = partial(row, "Weights changed in training_step, by units")
ONCE, WHOLE = {"module": "", "microbatches": 4}, {"module": "", "microbatches": 1}
for what, change, line in (
    ("clamped", s.clamp_scale, "the step changes self.scale at "),
    ("normalized", s.normalize_head, "the step changes self.model.8.weight at "),
    ("a running average", s.average_weights, "the step changes self.teacher.0.0.weight at "),
    ("copied by load_state_dict", s.copy_weights, "the step changes self.teacher.0.0.weight at "),
    ("assigned by data", s.assign_weights, "the step assigns data to self.model.8.weight at "),
):
    changed = partial(s.ChangesWeights, change)
    changes(f"{what}, several micro-batches", module=changed, strategy=ONCE, refused=line)
changes("a running average", module=partial(s.ChangesWeights, s.average_weights), strategy=WHOLE)
changed = partial(s.ChangesWeights, s.average_weights, after=True)
changes("a running average, after the layers", module=changed, strategy=WHOLE)
changes("clamped, one micro-batch", module=partial(s.ChangesWeights, s.clamp_scale), strategy=WHOLE)

changes = partial(row, "Weights changed in training_step")
CUT, UNCUT = {"microbatches": 4}, {"microbatches": 1}
for what, change, changed in (
    ("of a layer, clamped", s.clamp_layer, "self.model.4.0.weight"),
    ("of a layer, by data", s.scale_layer_data, "self.model.4.0.weight"),
):
    module = partial(s.ChangesAround, change)
    refused = f"training_step changes {changed}. The layers are on several processes"
    changes(f"{what}, several micro-batches", module=module, strategy=CUT, refused=refused)
    changes(f"{what}, one micro-batch", module=module, strategy=UNCUT, refused=refused)
for what, change, changed in (
    ("of a head, by data", s.scale_head_data, "self.outlet.weight"),
    ("of a head, assigned by data", s.assign_head_data, "self.outlet.weight"),
    ("of a momentum encoder", s.average_inlet, "self.teacher.weight"),
):
    module = partial(s.ChangesAround, change)
    refused = f"training_step changes {changed}. One process makes this change once for a batch"
    changes(f"{what}, several micro-batches", module=module, strategy=CUT, refused=refused)
    changes(
        f"{what}, one micro-batch",
        module=module,
        strategy=UNCUT,
        refused_on={4: f"training_step changes {changed}. Processes between the first stage and the last do not"},
    )
    changes(
        f"{what}, one micro-batch, after the layers",
        module=partial(s.ChangesAround, change, after=True),
        strategy=UNCUT,
        refused=f"training_step changes {changed}. Only the last stage runs the code after the layers",
    )

for what, change in (
    ("permuted by data", s.permute_head_data),
    ("by data from the second batch on", s.scale_head_later),
):
    changes(
        f"of a head, {what}, several micro-batches",
        module=partial(s.ChangesAround, change),
        strategy=CUT,
        refused="training_step changes self.outlet.weight. One process makes this change once for a batch",
    )

by_layers = partial(row, "Weights changed by layers")
for cut, path in (("", {}), (", by units", {"module": ""})):
    for what, change in (("scaled by data", s.scale_data), ("scaled without gradients", s.scale_in_place)):
        module = partial(s.ChangesInside, change)
        by_layers(
            f"{what}, several micro-batches{cut}",
            module=module,
            strategy={**path, "microbatches": 4},
            refused="changes self.model.4.weight. One process makes this change once for a batch, and here the forward",
        )
        by_layers(f"{what}, one micro-batch{cut}", module=module, strategy={**path, "microbatches": 1})
    module, refused = partial(s.ChangesInside, s.replace_parameter), "replaces self.model.4.weight. "
    by_layers(
        f"replaced, several micro-batches{cut}", module=module, strategy={**path, "microbatches": 4}, refused=refused
    )
    by_layers(
        f"replaced, one micro-batch{cut}",
        module=module,
        strategy={**path, "microbatches": 1},
        refused=refused if path else "",
    )
by_layers(
    "scaled by data, recomputed",
    module=partial(s.ChangesInside, s.scale_data),
    strategy={"microbatches": 1, "recompute": True},
    refused="changes self.model.4.weight. This stage runs its forward a second time",
)

changes = partial(row, "Weights changed in training_step, by units")
for what, strategy, line in (
    ("several micro-batches", ONCE, "changes self.model.8.weight. One process makes this change once for a batch"),
    ("one micro-batch", WHOLE, "changes self.model.8.weight. Stages 0, 1"),
):
    module = partial(s.ChangesWeights, s.write_through_numpy)
    changes(f"written through numpy, {what}", module=module, strategy=strategy, refused=line)
changes(
    "a parameter replaced, one micro-batch",
    module=partial(s.ChangesWeights, s.replace_last),
    strategy=WHOLE,
    refused="replaces self.model.8.weight. Other stages and checkpoints would keep the parameter",
)
