"""Rows about what steps log, return, differentiate and take from their batch."""

from __future__ import annotations

from functools import partial

from tests.compat import step_modules as s
from tests.compat.registry import row

steps = partial(row, "Steps")
steps("self.log of constants, numbers of samples, sums and means, by each reduce_fx", module=s.LogsReduced)
steps(
    "self.log of what is no mean, sum or extreme over samples",
    module=s.LogsSpread,
    warned="so that they differ from one process: outputs['most'], self.log('spread')",
    reason="a warning names the values",
)
steps(
    "self.log of a number that is 0 in the first batches",
    module=s.LogsLater,
    warned="self.log('events') of LogsLater.training_step was 0 in all batches that were looked at",
    reason="a warning names the value in the first batch in which it is not",
)
steps("numbers, words, counts and tables in the dict that training_step returns", module=s.ReturnsNumbers)
gap = "takes a gradient of what self.model(...) returns"
steps("autograd.grad through the layers, allow_unused=True", module=s.PenalisesUnused, refused=gap)
steps("autograd.grad through the layers and a skip around them", slow=True, module=s.PenalisesAround, refused=gap)
steps(
    "autograd.grad by weights kept in a list",
    slow=True,
    module=s.PenalisesKeptWeights,
    refused="takes a gradient of, or by,",
)
steps("autograd.grad by what the layers return", module=s.PenalisesOutput)
steps("autograd.grad before the layers", module=s.PenalisesBefore)
steps("backward() in training_step", slow=True, module=s.BackwardInStep, refused=gap)
steps(
    "autograd.grad through the layers in validation_step",
    slow=True,
    module=s.GradInValidation,
    refused="validation_step takes",
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
