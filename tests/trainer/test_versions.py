"""Who uses a torch that was not tested is told so."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from lightning_pipes.trainer.session import TESTED, warn_if_untested

ROOT = Path(__file__).parents[2]


def test_pages_name_the_versions_that_tests_run_on():
    pins = dict(re.findall(r"^([a-z-]+)==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = re.findall(r"^\| (\S+) \| ([0-9.]+) \| ([0-9.]+) \|", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    table = {name: (pinned, newest) for name, pinned, newest in rows}
    readme = (ROOT / "README.md").read_text()
    for name in ("torch", "lightning", "hydra-core", "optuna"):
        assert table[name][0] == pins[name]
        assert all(version in readme for version in table[name])
    assert tuple(map(int, table["torch"][1].split(".")[:2])) == TESTED


def test_newer_ones_are_told_once(caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        for version in ("2.14.0+cpu", "2.12.1", "2.15.0a0", "2.15.0a0", "3.0.0"):
            warn_if_untested(version)
    said = [r.getMessage() for r in caplog.records if "lightning_pipes" in r.getMessage()]
    assert [re.search(r"this is (\S+);", text)[1] for text in said] == ["2.15.0a0", "3.0.0"]
