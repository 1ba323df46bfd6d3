"""Check the text form of times."""

import pytest

from lightning_pipes.cost.units import seconds_text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 us"), (20_000_000, "20 ms"), (1.62e9, "1.62 s"), (5e12, "5000 s")],
)
def test_units(nanoseconds, text):
    assert seconds_text(nanoseconds) == text
