"""What a step logs, micro-batch by micro-batch, as of the whole batch."""

from __future__ import annotations

import pytest
import torch

from lightning_pipes.trainer.step.logs import LogCall, merge, recorded
from tests.trainer.lit import Lit


def test_merged_calls():
    def calls(mean: float, total: int, most: float, twice: list[float], size: int | None = None) -> list[LogCall]:
        return [
            LogCall("mean", torch.tensor(mean), {"prog_bar": True}),
            LogCall("sum", total, {"reduce_fx": "sum"}),
            LogCall("max", torch.tensor(most), {"reduce_fx": torch.max}),
            *(LogCall("twice", value) for value in twice),
            *([LogCall("sized", mean, {"batch_size": size})] if size else []),
        ]

    merged = merge([calls(1.0, 2, 5.0, [1.0, 10.0], 7), calls(4.0, 3, -1.0, [3.0, 30.0], 14)], [1, 2])
    by_name = [(c.name, float(c.value), c.options["batch_size"]) for c in merged]
    assert by_name == [
        ("mean", 3.0, 3),
        ("sum", 5.0, 3),
        ("max", 5.0, 3),
        ("twice", pytest.approx(7 / 3), 3),
        ("twice", pytest.approx(70 / 3), 3),
        ("sized", pytest.approx(3.0), 21),
    ]
    assert merged[0].options["prog_bar"]


def test_recording_leaves_the_module_as_it_was():
    module = Lit()
    with recorded(module) as calls:
        module.log("a", 1.0, True, on_epoch=True)
        module.log_dict({"b": torch.tensor(2.0), "c": 3}, batch_size=4)
    assert [(c.name, float(c.value)) for c in calls] == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert calls[0].options == {"prog_bar": True, "on_epoch": True}
    assert calls[1].options["batch_size"] == 4
    assert "log" not in vars(module)
