"""Check that a disturbed measurement is marked as invalid and has no number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import lightning_layer
from benchmarks.lightning_layer import Pace, Took, explain_invalid, is_disturbed


def test_a_layer_that_exceeds_its_pace_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the lateness of a layer on a virtual clock.

    The first forwards take 1 to 10 seconds, so the pace is 10. A later forward takes 13.
    """
    clock = SimpleNamespace(now=0.0)

    def perf_counter() -> float:
        clock.now += 1e-6
        return clock.now

    monkeypatch.setattr(lightning_layer, "time", SimpleNamespace(perf_counter=perf_counter))
    pace = Pace()
    for seconds in range(1, 11):
        pace.start("forward")
        clock.now += seconds
        pace.end("forward")
    pace.settle()
    pace.start("forward")
    clock.now += 9.999_99
    pace.end("forward")
    assert pace.late == 0.0
    pace.start("forward")
    clock.now += 13
    pace.end("forward")
    assert pace.late == pytest.approx(3.0, abs=1e-4)


def test_a_pair_counts_if_neither_step_was_disturbed_on_any_rank() -> None:
    good, bad = Took(0, 10**9, 0.019), Took(0, 10**9, 0.021)
    assert not is_disturbed([(good, good), (good, good)])
    assert is_disturbed([(good, good), (good, bad)])
    assert is_disturbed([(bad, good), (good, good)])


@pytest.mark.parametrize(
    ("overheads", "pairs", "reason"),
    [
        ([2.0, 2.1, 2.2, 2.3], 8, ""),
        ([2.0, 2.1, 2.2, 2.3], 9, "in 5 of 9 pairs layers took longer than their pace, or ranks waited for a core"),
        ([-40.0, 2.0, 2.1, 60.0], 4, "the middle half of 4 pairs is from"),
        ([], 4, "in 4 of 4 pairs"),
    ],
)
def test_invalid_measurement_has_a_reason(overheads: list[float], pairs: int, reason: str) -> None:
    found = explain_invalid(overheads, pairs, 200.0)
    assert found.startswith("not valid: ") == bool(reason)
    assert reason in found
