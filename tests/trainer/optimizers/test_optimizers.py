"""Tests of optimizers of one rank's parameters, and of their gathered states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.optimizers.optimizers import (
    OptimizerLayout,
    check_momentum,
    parameter_names,
    predict_change,
)
from tests.trainer.lit import Lit


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.0}),
    ],
)
def test_a_predicted_update_is_the_last_one(kind: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = kind([weight], lr=0.1, **settings)
    check_momentum([optimizer], "pipedream")
    assert predict_change(optimizer, optimizer.param_groups[0], weight) is None
    for scale in (3.0, 1.0, 0.1):
        before, weight.grad = weight.detach().clone(), scale * torch.randn(5, dtype=torch.float64)
        optimizer.step()
        change = predict_change(optimizer, {**optimizer.param_groups[0], "lr": 0.2}, weight)
        torch.testing.assert_close(change, 2 * (weight.detach() - before), rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_refuses_to_predict_without_momentum(kind: Any) -> None:
    with pytest.raises(PipelineError, match="extrapolates weights by momentum"):
        check_momentum([kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)], "pipedream")


def test_optimizer_keeps_groups_and_loses_foreign_parameters():
    module = Lit()
    optimizer = torch.optim.Adagrad(  # Adagrad creates its state immediately
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
        cut = ContainerCut(other, "model", local, Interceptor("self.model"))
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
