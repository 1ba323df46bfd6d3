"""Rows about gradients, norms, optimizer steps, and code that depends on several samples at a time."""

from __future__ import annotations

from functools import partial

from tests.compat import gradient_modules as g
from tests.compat.registry import row

norms = partial(row, "Gradients and norms")
norms("clip_grad_norm_ around the closure in optimizer_step", module=g.ClipsInStep)
norms("clip_grad_norm_ between closure and step", module=g.ClipsBetweenClosureAndStep)
norms("clip_grad_norm_ of optimizer.param_groups in a hook", module=g.ClipsGroups)
norms("clip_grad_norm_ of each group separately", module=g.ClipsEachGroup)
norms("clip_grad_norm_ of self.optimizers().param_groups", module=g.ClipsGroupsOfTrainer)
norms("a custom norm over optimizer.param_groups", module=g.ScalesByOwnNorm, refused="takes the value of")
norms("a custom norm in optimizer_step", module=g.ScalesByOwnNormInStep, refused="which is on another rank")
norms("parameters kept in a list, clipped in a hook", module=g.ClipsKept)
norms("parameters kept in a list, decayed in a hook", module=g.DecaysKept)
norms("parameters kept in a list, a custom norm in a hook", module=g.RescalesKept, refused="on another rank")
norms("parameters kept in a list, a penalty in the loss", module=g.PenalisesKept, refused="depends on weights")
by = lambda make: partial(g.LitBy, make)  # noqa: E731
norms("optimizer that clips by clip_grad_norm_ in its step", module=by(partial(g.ClippingSGD, lr=0.3)))
norms("optimizer that clips in a step hook", module=by(g.with_step_hook))
norms("optimizer with a norm of each tensor", module=by(g.Lamb))
norms("optimizer with a custom norm over all weights", module=by(partial(g.Lamb, whole=True)), refused="Lamb")
norms("optimizer with two closures", module=by(partial(g.SAM, lr=0.1, norm=False)))
norms("optimizer with two closures and a norm over all weights (SAM)", module=by(partial(g.SAM, lr=0.1)), refused="SAM")
norms("optimizer that draws random numbers", module=by(partial(g.NoisySGD, lr=0.1)), refused="NoisySGD")

several = partial(row, "Several samples at a time")
for name, before in (
    ("centered over the batch", g.centred),
    ("positions of the samples", g.numbered),
    ("sorted", g.ordered),
    ("a temperature that depends on the batch", g.tempered),
    ("a branch that depends on the first sample", g.by_the_first),
    ("centered in a later batch", g.by_the_second_batch),
):
    several(
        f"before the layers: {name}", module=partial(g.LitBefore, before), warned="training_step computes what enters"
    )
several("before the layers: each sample separately", module=partial(g.LitBefore, g.each_by_itself))
for name, work in (
    ("centered over the batch", g.in_layer_centred),
    ("softmax over the batch", g.in_layer_softmax),
):
    several(
        f"in a layer: {name}",
        module=partial(g.LitInLayer, work),
        strategy={"module": "model"},
        warned="layer 4 of self.model",
    )
several(
    "in a layer: a branch that depends on the first sample",
    module=partial(g.LitInLayer, g.in_layer_first, at=0),
    warned="layer 0 of self.model",
)
several("in a layer: each sample separately", module=partial(g.LitInLayer, g.by_sample))

hooks = partial(row, "Hooks of modules and parameters")
hooks("full backward hook of the pipelined module", module=g.BackwardHookOnAll, refused="has backward hooks")
hooks(
    "full backward hook of the pipelined module, registered in on_fit_start",
    module=g.BackwardHookOnAllLater,
    refused="registers a backward hook on",
)
hooks("forward hook of the pipelined module, registered in on_train_start", module=g.ForwardHookOnAllLater)
hooks("full backward hooks of layers", module=g.BackwardHookOnLayers)
hooks("hooks of parameters: clamped gradients", module=g.ClampsGradients)
hooks("hooks of parameters: signs", module=g.ClampsGradientsFromTheStart)
hooks(
    "hooks of parameters, accumulated gradients", {"accumulate_grad_batches": 2}, module=g.ClampsGradientsFromTheStart
)
hooks("hooks of parameters: masks", module=g.MasksGradients)
hooks("post-accumulate-gradient hooks that run the optimizer step", module=g.StepsInBackward)
hooks("nn.init in a hook", module=g.Initialises)
hooks("reset_parameters in a hook", module=g.Resets)
hooks("noise on gradients in a hook", module=g.AddsNoise)
hooks("random masks on weights in a hook", module=g.DrawsMasks)
hooks("layers appended in a hook", module=g.Appends, refused="adds layers to self.model")
hooks("a layer replaced in a hook", module=g.Replaces, refused="replaces layer 1 of self.model")
hooks("a part of a layer replaced in a hook", module=g.ReplacesInside)
hooks("the pipelined module replaced in a hook", module=g.Slices, refused="self.model has been replaced")
for change, changed, line in (
    ("layers appended", g.Appends, "self.model.9 is added at"),
    ("a part of a layer replaced", g.ReplacesInside, "self.model.2.0 is replaced at"),
    ("a layer removed", g.Removes, "is removed while the weights of the module are spread"),
):
    hooks(f"{change} in a hook, by units", module=changed, strategy={"module": ""}, refused=line)
hooks("a layer without weights replaced in a hook, by units", module=g.Replaces, strategy={"module": ""})
hooks("add_param_group in a hook", module=g.AddsGroup)
hooks("autograd.grad through the layers", module=g.Penalises, refused="autograd.grad")
hooks(
    "hooks of parameters while batches overlap",
    module=g.ClampsInside,
    strategy={"schedule": "pipedream", "schedule_args": {}},
    warned="run once for every micro-batch",
)
norms(
    "a custom norm over optimizer.param_groups while batches overlap",
    module=g.ScalesByOwnNormInside,
    strategy={"schedule": "pipedream", "schedule_args": {}},
    refused="takes the value of",
)
