"""Check that records of trainings are read, resumed and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.sim.records.training_record import RECORD_FOLDER, TrainingRecord, compare_runs


def written(folder: Path, name: str, *lines: dict[str, Any] | str) -> Path:
    (folder / RECORD_FOLDER).mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / RECORD_FOLDER / name).write_text(text)
    return folder


def batch(number: int, loss: str, layers: dict[str, str | None]) -> list[dict[str, Any]]:
    return [
        {"F": number, "layers": list(layers)},
        {"loss": loss, "of": number, "value": 0.5},
        {"B": number, "layers": layers},
    ]


def run(folder: Path, *changes: tuple[int, str]) -> Path:
    """Write batches 0 to 3 of two layers on two ranks; `changes` are different hashes of layer 10."""
    other = dict(changes)
    rank0 = [line for n in range(4) for line in batch(n, f"0x1.{n}p+0", {"10": other.get(n, f"a{n}")})]
    rank1 = [line for n in (0, 2) for line in batch(n, f"0x1.{n}p+0", {"2.1": f"b{n}"})]
    written(folder, "000-rank0.jsonl", {"begins": 0}, *rank0)
    return written(folder, "000-rank1.jsonl", {"begins": 0}, *[line for line in rank1 if "loss" not in line])


def load(folder: Path) -> TrainingRecord:
    return TrainingRecord.load(folder)


def test_equal_runs(tmp_path: Path) -> None:
    a, b = load(run(tmp_path / "a")), load(run(tmp_path / "b") / RECORD_FOLDER)
    found = compare_runs(a, b)
    assert found.is_equal
    assert str(found) == "equal in 4 losses and 6 hashes of layers; each of 2 layers was used in the same order"
    assert a.order("2.1") == "0F 0B 2F 2B"


def test_the_first_difference_is_found(tmp_path: Path) -> None:
    a, b = load(run(tmp_path / "a")), load(run(tmp_path / "b", (1, "other"), (3, "another")))
    found = compare_runs(a, b)
    assert (found.batch, found.layer, found.values, found.is_equal) == (1, "10", ("a1", "other"), False)
    assert str(found).startswith("layer 10 differs after batch 1: a1 and other;")
    b.losses[1] = "0x1.8p+0"
    assert str(compare_runs(a, b)).startswith("the loss of batch 1 differs: 0x1.1p+0 and 0x1.8p+0;")


def test_another_order_of_accesses_is_said(tmp_path: Path) -> None:
    a, b = load(run(tmp_path / "a")), load(run(tmp_path / "b"))
    order = b.accesses["10"]
    order[1], order[2] = order[2], order[1]
    found = compare_runs(a, b)
    assert (found.is_equal, found.orders) == (True, ("10",))
    assert str(found).endswith("used in another order: layers 10 of 2")


def test_a_fit_that_resumes_takes_the_place_of_what_it_repeats(tmp_path: Path) -> None:
    """Check a fit that resumes and repeats some batches.

    The first fit was killed in batch 3 on two ranks. The second one resumes from a checkpoint at batch 2 on one rank.
    """
    folder = run(tmp_path / "a")
    lines = [line for n in (2, 3) for line in batch(n, f"0x1.{n}p+0", {"10": f"a{n}"})]
    lines += [line for line in batch(2, "", {"2.1": "b2"}) if "loss" not in line]
    written(folder, "001-rank0.jsonl", {"begins": 2}, *lines)
    assert vars(load(folder)) == vars(load(run(tmp_path / "b")))


def test_a_line_that_was_cut_off_is_the_last(tmp_path: Path) -> None:
    folder = written(tmp_path, "000-rank0.jsonl", {"begins": 0}, *batch(0, "0x1p+0", {"0": "a"}), '{"F": 1, "la')
    assert load(folder).order("0") == "0F 0B"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["not json\n", {"begins": 0}], "line 1, is not valid JSON: 'not json'"),
        ([[1, 2]], "line 1, was not written by ReproducibilityLog"),
        ([{"F": 3}], "has a line that ReproducibilityLog did not write"),
    ],
)
def test_refuses_other_files(lines: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(written(tmp_path, "000-rank0.jsonl", *lines))


def test_refuses_runs_with_nothing_in_common(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no record of a training; the callback ReproducibilityLog writes one"):
        load(tmp_path)
    a = load(run(tmp_path / "a"))
    with pytest.raises(InputError, match="one has batches 0 to 3, the other none"):
        compare_runs(a, TrainingRecord())


def test_a_layer_on_several_ranks(tmp_path: Path) -> None:
    for rank, batches in enumerate(((0, 3, 4), (1, 2))):
        lines = [line for n in batches for line in batch(n, "0x1p+0", {"0": None})]
        folder = written(tmp_path, f"000-rank{rank}.jsonl", {"begins": 0}, *lines)
    assert load(folder).order("0") == "0F 0B 1F 1B 2F 2B 3F 3B 4F 4B"
