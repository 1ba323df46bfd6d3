"""Families of Hugging Face models train with the library's defaults what one process trains, padded labels too."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
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


def trained(rank: int, file: str) -> None:
    from benchmarks.hf_families import compare

    compare(rank, [*FAMILIES], file)


def trained_by_units(rank: int, file: str) -> None:
    from benchmarks.hf_families import compare

    compare(rank, [*BY_UNITS], file, {"module": "", "microbatches": 2})


def test_families_by_units(tmp_path: Path) -> None:
    file = tmp_path / "results"
    run_ranks(trained_by_units, 2, str(file), timeout=240)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(each["family"], each["outcome"]) for each in found} == {*BY_UNITS.items()}
    padded = [each["weighed"] for each in found if each["variant"] == "padded" and each["outcome"] == "equal"]
    assert len(padded) == 2
    assert all("labels in batch['labels'] that are not -100" in said for said in padded)


@cache
def results(file: str) -> list[dict[str, Any]]:
    run_ranks(trained, 2, file, timeout=240)
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("families") / "results")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family, file):
    found = {each["variant"]: each for each in results(file) if each["family"] == family}
    assert [(each["outcome"], each["said"]) for each in found.values()] == [("equal", "")] * 2
    assert found["default"]["cut"] == FAMILIES[family]
    assert "labels in batch['labels'] that are not -100" in found["padded"]["weighed"]
    assert ("shifted by one" in found["padded"]["weighed"]) == (family in ("llama", "gemma3n"))
