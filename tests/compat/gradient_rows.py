"""Rows about gradients, norms and steps of optimizers, and about code that looks at several samples at a time."""

from __future__ import annotations

from functools import partial

from tests.compat import gradient_modules as g
from tests.compat.registry import row

norms = partial(row, "Gradients and norms")
norms("clip_grad_norm_ around the closure in optimizer_step", module=g.ClipsInStep)
norms("clip_grad_norm_ between closure and step", module=g.ClipsBetweenClosureAndStep)
norms("clip_grad_norm_ of optimizer.param_groups in a hook", module=g.ClipsGroups)
norms("clip_grad_norm_ of each group by itself", module=g.ClipsEachGroup)
norms("clip_grad_norm_ of self.optimizers().param_groups", module=g.ClipsGroupsOfTrainer)
norms("a norm of one's own over optimizer.param_groups", module=g.ScalesByOwnNorm, refused="takes the value of")
norms("a norm of one's own in optimizer_step", module=g.ScalesByOwnNormInStep, refused="which is on another rank")
norms("parameters kept in a list, clipped in a hook", module=g.ClipsKept)
norms("parameters kept in a list, decayed in a hook", module=g.DecaysKept)
norms("parameters kept in a list, a norm of one's own in a hook", module=g.RescalesKept, refused="on another rank")
norms("parameters kept in a list, a penalty in the loss", module=g.PenalisesKept, refused="depends on weights")
by = lambda make: partial(g.LitBy, make)  # noqa: E731
norms("optimizer that clips by clip_grad_norm_ in its step", module=by(partial(g.ClippingSGD, lr=0.3)))
norms("optimizer that clips in a step hook", module=by(g.with_step_hook))
norms("optimizer with a norm of each tensor", module=by(g.Lamb))
norms("optimizer with a norm of its own over all weights", module=by(partial(g.Lamb, whole=True)), refused="Lamb")
norms("optimizer with two closures", module=by(partial(g.SAM, lr=0.1, norm=False)))
norms("optimizer with two closures and a norm over all weights (SAM)", module=by(partial(g.SAM, lr=0.1)), refused="SAM")
norms("optimizer that draws random numbers", module=by(partial(g.NoisySGD, lr=0.1)), refused="NoisySGD")
