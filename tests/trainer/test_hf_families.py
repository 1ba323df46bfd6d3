"""Families of Hugging Face models train with the library's defaults what one process trains, padded labels too."""

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
    "gemma3n": "net.model.layers",  # keys and values that layers share
    "t5gemma": "net.model.decoder.layers",  # two lists of layers, of which pp_plan names both
    "ultrabert": "net.model.layers",  # no shift by one
}


BY_UNITS = {"hrm_text": "equal", "diffusion_gemma": "equal", "segformer": "differs"}
"""Families that are cut by units only, and how they end: segformer, whose hooks collect outputs, normalises batches."""


def trained(rank: int, folder: str) -> None:
    from benchmarks.hf_families import compare

    compare(rank, [*FAMILIES], f"{folder}/layers")
    compare(rank, [*BY_UNITS], f"{folder}/units", {"module": "", "microbatches": 2})


@cache
def results() -> dict[str, list[dict[str, Any]]]:
    """What is found of each model, by how it is cut."""
    with TemporaryDirectory() as folder:
        run_ranks(trained, 2, folder, timeout=480)
        return {path.name: [*map(json.loads, path.read_text().splitlines())] for path in Path(folder).iterdir()}


def test_families_by_units() -> None:
    found = results()["units"]
    assert {(each["family"], each["outcome"]) for each in found} == {*BY_UNITS.items()}
    padded = [each["weighed"] for each in found if each["variant"] == "padded" and each["outcome"] == "equal"]
    assert len(padded) == 2
    assert all("labels in batch['labels'] that are not -100" in said for said in padded)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str) -> None:
    found = {each["variant"]: each for each in results()["layers"] if each["family"] == family}
    assert [(each["outcome"], each["said"]) for each in found.values()] == [("equal", "")] * 2
    assert found["default"]["cut"] == FAMILIES[family]
    assert "labels in batch['labels'] that are not -100" in found["padded"]["weighed"]
    assert ("shifted by one" in found["padded"]["weighed"]) == (family in ("llama", "gemma3n"))
