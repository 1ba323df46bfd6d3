import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.ir.registry import installed_schedules, make_schedule


@pytest.mark.parametrize("name", list(installed_schedules()))
def test_every_installed_schedule_bears_its_name(name):
    assert make_schedule(name).name == name


def test_settings_reach_the_schedule():
    assert make_schedule("kfkb", k=3).k == 3


def test_a_near_miss_is_named():
    with pytest.raises(PlanError, match="Did you mean 'kfkb'"):
        make_schedule("kfkd")


def test_unknown_settings_are_refused():
    with pytest.raises(PlanError, match=r"kfkb.*no setting 'depth'. Choose from: k, prune, largest_k$"):
        make_schedule("kfkb", depth=3)
    with pytest.raises(PlanError, match=r"no setting 'kk'. Did you mean 'k'\? Choose from: k, prune, largest_k$"):
        make_schedule("kfkb", k=2, kk=2)
    with pytest.raises(PlanError, match=r"no setting 'k'\. It has no settings"):
        make_schedule("1f1b", k=2)


def test_placement():
    assert make_schedule("gpipe").place_stages(3) == (0, 1, 2)
    assert make_schedule("interleaved", stages_per_rank=2).place_stages(2) == (0, 1, 0, 1)
