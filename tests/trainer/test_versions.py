"""Who uses a torch that was not tested is told so."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from lightning_pipes.trainer.versions import TESTED, tell_if_untested


def test_it_is_the_version_that_tests_run_on():
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text()
    found = re.search(r"^torch==(\d+)\.(\d+)", pins, re.MULTILINE)
    assert found is not None
    assert (int(found[1]), int(found[2])) == TESTED


def test_newer_ones_are_told_once(caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        for version in ("2.13.0+cpu", "2.12.1", "2.14.0a0", "2.14.0a0", "3.0.0"):
            tell_if_untested(version)
    said = [r.getMessage() for r in caplog.records if "lightning_pipes" in r.getMessage()]
    assert [re.search(r"this is (\S+);", text)[1] for text in said] == ["2.14.0a0", "3.0.0"]
