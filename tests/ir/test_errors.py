"""Check the exception types: errors of plans differ from errors of the user's input."""

import re
from pathlib import Path

import pytest

import lightning_pipes
from lightning_pipes.cost.units import parse_bytes
from lightning_pipes.ir import InputError, PlanError, check_count
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.generators import tiny_plan

HOME = Path(lightning_pipes.__file__).parent


@pytest.mark.parametrize(
    "wrong", [lambda: check_count("k", 0), lambda: parse_bytes("7 quarts"), lambda: make_schedule("deep", slack=-1)]
)
def test_what_was_given(wrong):
    with pytest.raises(InputError) as error:
        wrong()
    assert isinstance(error.value, PlanError)  # callers that catch every error before a run catch this one


def test_a_plan_is_a_plan():
    with pytest.raises(PlanError) as error:
        make_schedule("pipedream_2bw").program(tiny_plan(stages=4, microbatches=1))
    assert not isinstance(error.value, InputError)


@pytest.mark.parametrize("layer", ["cost", "tune"])
def test_layers_without_plans_raise_none(layer):
    for path in (HOME / layer).rglob("*.py"):
        assert not re.search(r"raise PlanError", path.read_text(encoding="utf-8")), path
