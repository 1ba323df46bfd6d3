"""Check that the timelines above orders and loops are the output of the code."""

import pytest

from tests.packaging.timelines import ROOT, drawings

SCHEDULES = sorted(ROOT.glob("strategies/*/schedule.py"))
LOOPS = {
    "lightning_pipes/sim/loops/kernel.py": {"run_fixed_order", "run_chosen_order"},
    "strategies/jap/solvers/kernel.py": {
        "list_schedule",
        "time_sequence",
        "exchange_blocks",
        "construct_order",
        "expand_nodes",
    },
    "strategies/jap/stream.py": {"stream_jobs"},
}
DRAWN = [drawing for path in [*SCHEDULES, *(ROOT / name for name in LOOPS)] for drawing in drawings(path)]


@pytest.mark.parametrize("drawing", DRAWN, ids=str)
def test_figure_is_up_to_date(drawing):
    assert drawing.shown == drawing.anew(), f"draw it anew:\n{drawing.anew()}"


@pytest.mark.parametrize("path", SCHEDULES, ids=[path.parent.name for path in SCHEDULES])
def test_every_schedule_shows_its_order(path):
    assert drawings(path)


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_has_one(name):
    assert LOOPS[name] <= {drawing.below for drawing in drawings(ROOT / name)}
