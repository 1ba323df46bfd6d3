"""Check each unit by hand."""

from __future__ import annotations

import math

import pytest

from lightning_pipes.cost.units import bytes_text, parse_bytes, parse_rate, parse_seconds, seconds_text
from lightning_pipes.ir import PlanError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 17_179_869_184),
        ("16GB", 16_000_000_000),
        ("1.5 MiB", 1_572_864),
        ("3KiB", 3072),
        ("3kB", 3000),
        ("7B", 7),
        ("512", 512),
        (512, 512),
        (2.0**40, 2**40),
        ("1e3MB", 10**9),
    ],
)
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [("12.5GB/s", 1.25e10), ("100Gbit/s", 1.25e10), ("1MiB/s", 2.0**20), (1e9, 1e9), ("inf", math.inf)],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("10us", 1e-5), ("0", 0.0), ("1.5 ms", 1.5e-3), (2, 2.0), ("3ns", 3e-9)])
def test_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "16gib", r"'16gib' is not a size; write it as 16GiB, or as a plain number. Units: B, kB, MB"),
        (parse_bytes, "16GB/s", "is not a size"),
        (parse_bytes, "-1GB", "is not a size"),
        (parse_bytes, "inf", "a size has to be finite"),
        (parse_bytes, math.nan, "is not a size"),
        (parse_rate, "12.5GB", "is not a rate; write it as 12.5GB/s"),
        # It is unclear whether this means bits or bytes.
        (parse_rate, "10Gb/s", "is not a rate"),
        (parse_rate, "0GB/s", "a rate has to be positive"),
        (parse_seconds, "10 minutes", "is not a time"),
        (parse_seconds, "inf", "a time has to be finite"),
        (parse_seconds, "", "is not a time"),
    ],
)
def test_everything_else_is_refused(parse, text, message):
    with pytest.raises(PlanError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2048, "2 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**50, "1024 TiB")],
)
def test_bytes_text(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 us"), (20_000_000, "20 ms"), (1.62e9, "1.62 s"), (5e12, "5000 s")],
)
def test_seconds_text(nanoseconds, text):
    assert seconds_text(nanoseconds) == text
