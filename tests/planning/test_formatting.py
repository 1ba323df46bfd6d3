"""Check that the code accepts the text which users paste from the output."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest

from lightning_pipes.ir import Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.formatting import (
    describe_moves,
    hydra_overrides,
    join_words,
    layers_text,
    progress_bar,
    schedule_label,
    schedule_settings,
    strategy_arguments,
    strategy_line,
)
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.testing.generators import record_of


def test_the_line_makes_the_strategy():
    from lightning_pipes import PipelineStrategy

    schedule = make_schedule("kfkb", k=2)
    plan = record_of([1] * 6, 3, 4, "kfkb", k=2).plan
    line = strategy_line(strategy_arguments(schedule, plan))
    assert line == 'PipelineStrategy("kfkb", microbatches=4, schedule_args={"k": 2}, partition=[2, 4])'
    made = eval(line, {"PipelineStrategy": PipelineStrategy})
    assert made.schedule == schedule


def test_recompute_and_open_layers():
    plan = even_plan(make_schedule("1f1b"), 2, 4, 8, recompute=True)
    assert strategy_line(strategy_arguments(make_schedule("1f1b"), plan)) == (
        'PipelineStrategy("1f1b", microbatches=4, recompute=True)'
    )


def test_settings_are_numbers_and_what_is_not_by_default():
    @dataclass(frozen=True)
    class Mine(Schedule):
        k: int = 1
        limits: tuple[int, ...] = ()
        eager: bool = False
        name: ClassVar[str] = "mine"

        def program(self, plan):
            raise NotImplementedError

    assert schedule_settings(Mine()) == {"k": 1}
    assert schedule_label(Mine(2, (3, 4), True)) == "mine k=2 limits=(3, 4) eager=True"
    given = strategy_arguments(Mine(2, (3, 4), True), even_plan(Mine(), 2, 4, 8))
    assert hydra_overrides(given) == (
        "schedule=mine schedule.k=2 schedule.limits=[3,4] schedule.eager=true pipeline.microbatches=4"
    )


def test_overrides_compose():
    from hydra import compose, initialize_config_module

    given = {"schedule": "kfkb", "schedule_args": {"k": 3}, "microbatches": 6, "partition": [2, 4], "recompute": True}
    with initialize_config_module("lightning_pipes.conf", version_base="1.3"):
        cfg = compose("train", overrides=hydra_overrides(given).split())
    assert (cfg.schedule.k, cfg.pipeline.microbatches, list(cfg.pipeline.partition)) == (3, 6, [2, 4])
    assert cfg.pipeline.recompute is True


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([3, 6], [3, 6], []),
        ([3, 6], [3, 5], ["layer 5 from stage 1 to stage 2"]),
        ([3, 6], [5, 6], ["layers 3-4 from stage 1 to stage 0"]),
    ],
)
def test_moves(before, after, said):
    def spans(cuts):
        edges = [0, *cuts, 9]
        return [Span(a, b) for a, b in pairwise(edges)]

    assert describe_moves(spans(before), spans(after)) == said


def test_lists():
    assert [join_words(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [layers_text(Span(2, n)) for n in (2, 3, 5)] == ["no layer", "layer 2", "layers 2-4"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_after_a_second(stream, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar("plan") as told:
        told("gpipe", 0.1)
        before = sys.stderr.getvalue()
        now[0] += 1.05
        told("kfkb", 0.6)
        told("kfkb", 0.5)  # the bar never moves back
        after = sys.stderr.getvalue()
    assert before == ""
    assert ("plan: kfkb  60%" in after) is shown
