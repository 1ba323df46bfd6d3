"""Programs that ranks cannot start again: notebooks, prompts, standard input, and code given with `python -c`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_environment, scale_timeout
from lightning_pipes.trainer.fork_launcher import ForkLauncher
from tests.launch.example import environment

CELLS = """
from tests.launch.notebook import *
found = {}
for devices in (1, 2):
    trainer = make_trainer(devices, default_root_dir=str(devices), enable_checkpointing=True, callbacks=[Counts()])
    net = Net()
    trainer.fit(net, loader())
    print(trainer.strategy.report is not None)
    found[devices] = [describe(trainer, net), trainer.test(net, loader(), verbose=False)]
    found[devices].append([y.tolist() for y in trainer.predict(net, loader())])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, loader())
    found[devices].append(describe(trainer, net))
    trainer.save_checkpoint(f"{devices}.ckpt")

print("FOUND", found)
try:
    make_trainer(2).fit(Net(raise_error), loader())
except ZeroDivisionError as error:
    print("RAISED", error, "raise_error(self" in str(error.__cause__) or "in raise_error" in str(error.__cause__))

try:
    make_trainer(2).fit(Net(interrupt), loader())
except (SystemExit, KeyboardInterrupt) as error:
    print("INTERRUPTED", type(error).__name__)

import multiprocessing
print("LEFT", multiprocessing.active_children())
exit()
"""


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """After training on forked ranks, the notebook process has the same state as after a training in one process.

    Errors and interrupts of ranks also reach the notebook, and no process is left.
    """
    env = run_environment("notebook", tmp_path) | environment("notebook")
    run = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=CELLS,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
        timeout=scale_timeout(120),
    )
    lines = {line.split(" ", 1)[0]: line for line in run.stdout.splitlines()}
    assert "FOUND" in lines, run.stdout + run.stderr
    found: dict[int, list[Any]] = ast.literal_eval(lines["FOUND"].removeprefix("FOUND "))
    assert found[1][0]["counts"] == (2, 6, "finished")
    for one, two in zip(found[1], found[2], strict=True):
        compare(one, two)
    assert found[1][0]["weights"] != found[1][3]["weights"]
    assert torch.load(tmp_path / "2.ckpt", weights_only=False)["global_step"] == found[1][3]["counts"][1]
    assert lines["RAISED"] == "RAISED of a hook True", run.stderr
    assert lines["INTERRUPTED"].split()[1] in ("SystemExit", "KeyboardInterrupt")
    assert lines["LEFT"] == "LEFT []"


def compare(one: Any, two: Any) -> None:
    """Check that two nested structures are equal, up to rounding for floats."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        one, two = [*one.values()], [*two.values()]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(two), (one, two)
        for pair in zip(one, two, strict=True):
            compare(*pair)
    elif isinstance(one, float):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    else:
        assert one == two


def test_forks_can_not_use_cuda_after_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ForkLauncher(None, None, 2, "it runs in a notebook or at a prompt")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlanError, match=r"has already used CUDA.* Restart the notebook"):
        launcher.launch(print, trainer=object())  # type: ignore[arg-type]


def test_strategy_is_shown_as_it_is_made() -> None:
    """`repr` of a strategy is its constructor call, and passing it to Fabric or pytorch_lightning is refused."""
    made = PipelineStrategy("kfkb", microbatches=4, schedule_args={"k": 2})
    assert repr(made) == "PipelineStrategy('kfkb', microbatches=4, schedule_args={'k': 2})"
    assert repr(PipelineStrategy()) == "PipelineStrategy('1f1b')"
    for module, named in {
        "lightning.fabric.connector": "Fabric",
        "pytorch_lightning.trainer.connectors.accelerator_connector": "pytorch_lightning",
    }.items():
        with pytest.raises(PlanError, match=f"{named}.*import lightning.pytorch as pl"):
            exec("repr(made)", {"made": made, "__name__": module})
