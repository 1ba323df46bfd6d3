"""Tests of `ReproducibilityLog`: records of a training are bitwise equal on any number of stages."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_pipes import ReproducibilityLog
from lightning_pipes.ir import PipelineError
from lightning_pipes.sim.records.training_record import RECORD_FOLDER, TrainingRecord, compare_runs
from lightning_pipes.supernets import Uniform
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.tune.cli import main
from tests.supernets.nets import explorer, fit, supernet
from tests.trainer.lit import Lit
from tests.trainers import make_trainer

BATCHES = 20


def record(folder: Path, stages: int, shared: str = "sequential") -> TrainingRecord:
    """Train a supernet on a number of stages and return its record."""
    run_ranks(fit, stages, stages, shared, BATCHES, str(folder), timeout=120)
    return TrainingRecord.load(folder)


@pytest.mark.parametrize("stages", [(2,), pytest.param((1, 2, 4, 8), marks=pytest.mark.slow)])
def test_all_is_equal_on_any_number_of_stages(
    stages: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that losses and the order of accesses to each layer are equal on any number of stages.

    The order must be the order of training one subnet after another (NASPipe, Zhao et al. 2022, Table 4).
    """
    first, *others = (record(tmp_path / str(n), n) for n in stages)
    for other in others:
        found = compare_runs(first, other)
        assert found.is_equal
        assert (found.orders, found.losses) == ((), 2 * BATCHES)
    net, subnets = supernet("sequential"), explorer("sequential")
    assert isinstance(subnets, Uniform)
    uses = [net.layers_of(subnets.choose_subnet(n)) for n in range(2 * BATCHES)]
    for layer in first.accesses:
        users = [n for n, use in enumerate(uses) if layer in use]
        assert first.order(layer) == " ".join(f"{n}F {n}B" for n in users)
    assert len(first.accesses) == len({layer for use in uses for layer in use})
    capsys.readouterr()
    folders = [str(tmp_path / str(n)) for n in (stages * 2)[:2]]
    assert main(["compare", *folders, "--layer", "3.3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[1:] == said[1].split()[1:] == first.order("3.3").split()
    assert said[2].startswith(f"equal in {2 * BATCHES} losses")


@pytest.mark.slow
def test_asynchronous_training_parts_somewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that `compare` reports a difference between asynchronous trainings on 2 and on 4 stages."""
    for stages in (2, 4):
        args = ("sequential", BATCHES, str(tmp_path / str(stages)), None, -1, False, None, "pipedream")
        run_ranks(fit, stages, stages, *args, timeout=120)
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(tmp_path / "2"), str(tmp_path / "4"), "--json"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["orders"] != []) == (False, True)
    assert found["batch"] < 5


def test_command_names_missing_files(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no record of a training"):
        main(["compare", str(tmp_path), str(tmp_path)])
    (tmp_path / RECORD_FOLDER).mkdir()
    (tmp_path / RECORD_FOLDER / "000-rank0.jsonl").write_text('{"begins": 0}\n{"F": 0, "layers": ["0"]}\n')
    with pytest.raises(SystemExit, match="no batch in common"):
        main(["compare", str(tmp_path), str(tmp_path)])
    (tmp_path / RECORD_FOLDER / "000-rank0.jsonl").write_text('{"begins": 0}\n{"loss": "0x1p+0", "of": 0}\n')
    with pytest.raises(SystemExit, match="no batch of these runs uses a layer '7'"):
        main(["compare", str(tmp_path), str(tmp_path), "--layer", "7"])


def test_refuses_a_trainer_that_flushes() -> None:
    trainer = make_trainer(devices="auto", callbacks=[ReproducibilityLog()], max_epochs=1)
    with pytest.raises(PipelineError, match="this trainer has SingleDeviceStrategy"):
        trainer.fit(Lit(), pl.LightningDataModule.from_datasets([0]))
    with pytest.raises(PipelineError, match="every_n_batches must be at least 1"):
        ReproducibilityLog(every_n_batches=0)
