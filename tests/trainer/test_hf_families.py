"""Checks that families of Hugging Face models train as in one process, with default settings and with padded labels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_pipes.testing.ranks import run_ranks

FAMILIES = {
    "llama": "net.model.layers",
    "gemma3n": "net.model.layers",  # layers share keys and values
    "t5gemma": "net.model.decoder.layers",  # pp_plan names both lists of layers
    "ultrabert": "net.model.layers",  # labels are not shifted by one
}


BY_UNITS = {"hrm_text": "equal", "diffusion_gemma": "equal", "segformer": "differs"}
"""Families that are only cut by units, with the expected outcome.

The outcome of segformer differs because it uses batch normalization. Its hooks collect outputs.
"""


def trained(rank: int, folder: str) -> None:
    """Compare all families on this rank and write the results to `folder`."""
    from benchmarks.hf_families import compare

    compare(rank, [*FAMILIES], f"{folder}/layers")
    compare(rank, [*BY_UNITS], f"{folder}/units", {"module": "", "microbatches": 2})


@cache
def results() -> dict[str, list[dict[str, Any]]]:
    """Return the results of all models, by the way in which they are cut."""
    with TemporaryDirectory() as folder:
        run_ranks(trained, 2, folder, timeout=480)
        return {path.name: [*map(json.loads, path.read_text().splitlines())] for path in Path(folder).iterdir()}


def test_families_by_units() -> None:
    """Families that are cut by units have the expected outcomes, and padded labels are weighted correctly."""
    found = results()["units"]
    assert {(each["family"], each["outcome"]) for each in found} == {*BY_UNITS.items()}
    padded = [each["weighed"] for each in found if each["variant"] == "padded" and each["outcome"] == "equal"]
    assert len(padded) == 2
    assert all("labels in batch['labels'] that are not -100" in said for said in padded)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str) -> None:
    """A family is cut at the expected layers, and trains as in one process with default and with padded labels."""
    found = {each["variant"]: each for each in results()["layers"] if each["family"] == family}
    assert [(each["outcome"], each["said"]) for each in found.values()] == [("equal", "")] * 2
    assert found["default"]["cut"] == FAMILIES[family]
    assert "labels in batch['labels'] that are not -100" in found["padded"]["weighed"]
    assert ("shifted by one" in found["padded"]["weighed"]) == (family in ("llama", "gemma3n"))
