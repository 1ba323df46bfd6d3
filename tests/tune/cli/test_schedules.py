"""Tests for `lightning-pipes schedules`."""

from __future__ import annotations

import pytest

from lightning_pipes.ir.registry import installed_schedules
from tests.tune.cli.calls import Say, found


class TestSchedules:
    def test_all_that_are_installed(self, say: Say) -> None:
        text = say("schedules")
        lines = {
            line.split()[0]: line for line in text.splitlines() if line and line.split()[0] in installed_schedules()
        }
        assert set(lines) == set(installed_schedules())
        assert "stages_per_rank=2" in lines["interleaved"]
        assert "All forwards of a batch, then all backwards in the same order" in lines["gpipe"]

    def test_numbers_equal_the_closed_forms(self, say: Say) -> None:
        by_name = {each["name"]: each for each in found(say, "schedules")["schedules"]}
        p, m = 4, 8
        assert by_name["1f1b"]["bubble"] == pytest.approx((p - 1) / (m + p - 1), abs=1e-4)
        assert by_name["interleaved"]["bubble"] == pytest.approx((p - 1) / 2 / (m + (p - 1) / 2), abs=1e-4)
        assert (by_name["gpipe"]["held"], by_name["1f1b"]["held"]) == (m, p)
        assert by_name["v"]["held"] == 3  # V-Half: six half-stages
