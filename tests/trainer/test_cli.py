"""Tests of LightningCLI with the strategy given on the command line or in files, by name or by class."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences, plain_values, quiet

APP = Path(__file__).parent / "cli_app.py"
COMMON = [
    "fit",
    "--trainer.accelerator=cpu",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=2",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--model.width=6",
]
CLASS = "lightning_pipes.PipelineStrategy"
FILE = """
trainer:
  devices: 2
  strategy:
    class_path: lightning_pipes.PipelineStrategy
    init_args:
      schedule: kfkb
      schedule_args: {k: 2}
      microbatches: 4
      partition: [3]
      timeout: "0:05:00"
"""
OBJECT = """
trainer:
  devices: 2
  strategy:
    class_path: lightning_pipes.PipelineStrategy
    init_args:
      schedule:
        class_path: lightning_pipes.strategies.kfkb.KFKB
        init_args: {k: 2}
"""
# Arguments in addition to COMMON, and the schedule and number of micro-batches that the strategy should get from them.
GIVEN: dict[str, tuple[list[str], tuple[str, int | None]]] = {
    "name": (["--trainer.strategy=pipeline_gpipe"], ("GPipe()", None)),
    "class with arguments": (
        [f"--trainer.strategy={CLASS}", "--trainer.strategy.schedule=kfkb", "--trainer.strategy.microbatches=4"],
        ("KFKB(k=1)", 4),
    ),
    "short class name with arguments": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.schedule=gpipe"],
        ("GPipe()", None),
    ),
    "bare class": ([f"--trainer.strategy={CLASS}"], ("OneFOneB()", None)),
    "bare short class name": (["--trainer.strategy=PipelineStrategy"], ("OneFOneB()", None)),
    "class_path": ([f"--trainer.strategy.class_path={CLASS}"], ("OneFOneB()", None)),
    "file": (["--config=file.yaml"], ("KFKB(k=2)", 4)),
    "file with a schedule object": (["--config=object.yaml"], ("KFKB(k=2)", None)),
}


def on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    """Return the settings of the strategy and the trained weights for each way to name the strategy."""
    from tests.trainer.cli_app import main

    quiet()
    os.chdir(folder)
    found = {}
    for name, (given, _) in GIVEN.items():
        files = [f"--trainer.default_root_dir={folder}/{name}"]
        trainer = main([*COMMON, "--trainer.devices=2", *files, *given]).trainer
        strategy: Any = trainer.strategy
        weights = plain_values(dict(trainer.lightning_module.state_dict()))
        found[name] = (repr(strategy.schedule), strategy._request.microbatches), weights
    return found


def plain_weights(folder: Path) -> Any:
    """Return the weights after training on one device without a pipeline."""
    from tests.trainer.cli_app import main

    quiet()
    trainer = main([*COMMON, "--trainer.devices=1", f"--trainer.default_root_dir={folder}/plain"]).trainer
    return plain_values(dict(trainer.lightning_module.state_dict()))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the weights of one process, without affecting the random numbers of this process."""
    with torch.random.fork_rng():
        return plain_weights(tmp_path_factory.mktemp("plain"))


def test_every_way_to_name_the_strategy(tmp_path: Path, expected: Any) -> None:
    """Each way to give the strategy has the expected settings and trains the weights of one process."""
    (tmp_path / "file.yaml").write_text(FILE)
    (tmp_path / "object.yaml").write_text(OBJECT)
    ranks = run_ranks(on_a_rank, 2, str(tmp_path))
    for found in ranks:
        for name, (_, settings) in GIVEN.items():
            assert found[name][0] == settings, name
            assert differences(found[name][1], expected, at=name) == []


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_a_script_with_lightnings_launcher(tmp_path: Path, expected: Any) -> None:
    """A script that Lightning launches with a printed configuration file trains the weights of one process.

    It also writes the configuration to its folder.
    """
    from tests.trainer.cli_app import main

    config = io.StringIO()
    given, _ = GIVEN["class with arguments"]
    with redirect_stdout(config), pytest.raises(SystemExit):
        main([*COMMON, *given, "--trainer.devices=2", "--print_config"])
    (tmp_path / "printed.yaml").write_text(config.getvalue())
    left = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by trainings in this process
    env = {k: v for k, v in os.environ.items() if k not in left}
    command = [sys.executable, str(APP), "fit", "--config=printed.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert differences(plain_values(dict(weights)), expected) == []
    assert "schedule: kfkb" in (tmp_path / "config.yaml").read_text()
