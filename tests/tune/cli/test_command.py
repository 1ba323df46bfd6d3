"""Tests for the output functions that all commands share."""

from __future__ import annotations

from lightning_pipes.tune.cli.command import format_table


def test_tables_line_up() -> None:
    text = format_table([{"name": "a", "n": "1"}, {"name": "long", "n": "10"}])
    assert text.splitlines() == ["name   n", "a      1", "long  10"]
    assert format_table([]) == ""
