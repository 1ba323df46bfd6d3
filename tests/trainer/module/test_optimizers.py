"""Optimizers of one rank's parameters, and their whole states."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.optimizers import OptimizerLayout, parameter_names
from lightning_pipes.trainer.module.pipelined import CutModule
from tests.trainer.lit import Lit


def test_optimizer_keeps_groups_and_loses_foreign_parameters():
    module = Lit()
    optimizer = torch.optim.Adagrad(  # makes its state at once
        [{"params": [p for n, p in module.named_parameters() if n.endswith(e)]} for e in ("weight", "bias")]
    )
    whole = parameter_names(module, [optimizer])[0]
    one_process = copy.deepcopy(optimizer.state_dict())
    layouts = []
    for local in ([0, 1], [2, 3, 4, 5, 6, 7, 8]):
        other = copy.deepcopy(module)
        mine = torch.optim.Adagrad(
            [{"params": [p for n, p in other.named_parameters() if n.endswith(e)]} for e in ("weight", "bias")]
        )
        cut = CutModule(other, "model", local, Interceptor("self.model"))
        layouts.append((mine, OptimizerLayout(mine, whole)))
        layouts[-1][1].keep_local(cut.is_foreign)
    first, layout = layouts[0]
    assert layout.local == (("model.0.0.weight",), ("model.0.0.bias",))
    assert len(first.state) == 2
    states = [layout.states_by_name(o.state_dict()) for o, layout in layouts]
    gathered = layout.whole_state(first.state_dict(), states)
    assert str(gathered) == str(one_process)
    for mine, layout in layouts:
        mine.load_state_dict(layout.local_state(one_process))
    one_process["param_groups"].pop()
    with pytest.raises(PipelineError, match="has 1 parameter groups, this one 2"):
        layout.local_state(one_process)
