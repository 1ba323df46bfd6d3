"""Check the tables of figures, the command that makes them, and figures that are simulated."""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module

import pytest

from benchmarks.papers.__main__ import PAPERS, arguments_of, main
from benchmarks.papers.dynpipe.planner import ONSET, during, steps_to_recover, trained
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from tests.strategies.dynpipe.neighbourhood import Neighbourhood, layered_model


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.papers", *arguments])
    main()


@pytest.mark.parametrize("paper", PAPERS)
def test_functions_take_the_parameters_of_their_figures(paper: str) -> None:
    for figure in PAPERS[paper].values():
        module, _, name = figure.made_by.partition(":")
        function = getattr(import_module(f"benchmarks.papers.{paper}.{module}"), name)
        for quick in (False, True):
            inspect.signature(function).bind(**arguments_of(figure, quick, {}))
        assert set(figure.quick) <= set(figure.parameters)


def test_analysis_of_kfkb_equals_its_page(monkeypatch, capsys) -> None:
    """Compare with the drawings of two stages and with the table of four in strategies/kfkb/README.md."""
    run(monkeypatch, "kfkb", "f2", "--json", "--set", "cases=((2, 4), (4, 16))")
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"f2_gain_2": round(34 / 32 - 1, 4), "f2_gain_4": round(284 / 240 - 1, 4)}
    assert lines[-2] == "4 stages, 16 micro-batches: 1F1B 71.0 forwards, 2F2B 60.0, +18.3%"


def test_the_list_and_mistakes(monkeypatch, capsys) -> None:
    run(monkeypatch)
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for figures in PAPERS.values() for name in figures)
    for arguments, said in (
        (["kfkb", "f1"], "kfkb has no figure f1; it has f2, f6"),
        (["jap", "stages", "--set", "ranks=4"], "no parameter ranks; stages have none"),
        (["csp", "peers", "--set", "seed=1"], "no parameter seed; peers have rounds, subnets, ways"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, *arguments)
        assert said in capsys.readouterr().err


def test_systems_of_dynpipe_next_to_a_neighbour() -> None:
    """Check two stages with eight micro-batches, of which the last one becomes twice as slow.

    A step takes the time of the slower stage for each micro-batch. The first stage also waits for the last one after
    its two first forwards, and the last one for the forward and the backward of the first one at both ends.
    """
    slow = during(1, 2.0, ONSET, 10**6)
    world = Neighbourhood(layered_model([0.01] * 8, edge=1e-6), OneFOneB(), 2, 8, 8, slow.slowdown)
    runs = trained(world, 400, slow.steady)

    def step(layers: int, factor: float) -> float:
        first, last = 0.03 * layers, factor * 0.03 * (8 - layers)  # a forward takes a third of this
        return 8 * last + first if last >= first else 8 * first + last - first / 3

    never = [step(4, 1.0)] * ONSET + [step(4, 2.0)] * (400 - ONSET)
    assert runs["never"].seconds == pytest.approx(never, rel=1e-6)
    best = min(step(layers, 2.0) for layers in range(1, 8))
    assert best == step(6, 2.0) < step(5, 2.0)
    assert runs["oracle"].seconds[ONSET + 1 :] == pytest.approx([best] * (400 - ONSET - 1), rel=1e-6)
    assert runs["restart"].seconds[:-1] == runs["never"].seconds[:-1], "an epoch has 400 batches"
    assert runs["dynpipe"].seconds[-1] == pytest.approx(best, rel=1e-6)
    assert runs["dynpipe"].moves == 1
    assert 0 < steps_to_recover(runs["dynpipe"], runs["oracle"], ONSET, 400) < 40
