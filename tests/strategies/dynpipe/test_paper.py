import numpy as np
import pytest

from lightning_pipes.strategies.dynpipe.stage_search import extend_pipeline, paper_seconds, true_seconds
from tests.strategies.dynpipe.iteration_bound import least_seconds


def pipelines(count: int, seed: int, stages: int) -> list[tuple[list[float], list[float]]]:
    rng = np.random.default_rng(seed)
    return [(rng.uniform(0.5, 2, stages).tolist(), rng.uniform(0, 1.5, stages - 1).tolist()) for _ in range(count)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_no_pipeline_is_faster_than_the_bound(stages: int) -> None:
    every = pipelines(30, 0, stages)
    true = np.array(true_seconds(every, batches=60))
    least = np.array([least_seconds(*each) for each in every])
    assert (least <= true * 1.01).all()  # the batches of the 60-batch mean do not all take the same time
    assert (true / least - 1).mean() < 0.08  # the bound is close


def test_two_stages_are_exact() -> None:
    every = pipelines(20, 1, 2)
    for (stages, transfers), true in zip(every, true_seconds(every, batches=60), strict=True):
        (a, b), (c,) = stages, transfers
        exact = max(a, b, (a + b + c) / 2)
        assert true == pytest.approx(exact, rel=1e-6)
        assert paper_seconds(stages, transfers) == pytest.approx(exact)


def test_as_printed_the_first_stage_is_never_the_slowest() -> None:
    """Check that the printed formula ignores a slow first stage, although no batch can pass a stage faster."""
    assert paper_seconds([5.0, 1.0], [1.0], printed=True) == 3.5
    assert paper_seconds([5.0, 1.0], [1.0]) == 5.0
    assert extend_pipeline(1.0, 5.0, 1.0, printed=True) == 5.0


def test_on_more_stages_it_is_off_by_a_tenth() -> None:
    errors = []
    for stages in range(3, 9):
        every = pipelines(25, stages, stages)
        true = np.array(true_seconds(every))
        errors += [
            (printed, np.array([paper_seconds(*each, printed=printed) for each in every]) / true - 1)
            for printed in (True, False)
        ]
    as_printed, corrected = (np.concatenate([e for flag, e in errors if flag is printed]) for printed in (True, False))
    assert np.abs(as_printed).mean() > 0.08
    assert np.abs(corrected).mean() > 0.05
    assert as_printed.min() < -0.15  # too fast
    assert corrected.max() > 0.15  # too slow
