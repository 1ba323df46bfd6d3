"""An array of two processes as a script, for several calls of torchrun that share a study in a journal file.

The first attempt of array 0 dies in its third trial.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import optuna
from optuna.trial import BaseTrial

from lightning_pipes import optimize_array
from lightning_pipes.tune.studies.search import open_storage
from tests.tune.sweep import fit, new_study

TRIALS = 4
"""The number of trials of each attempt."""

if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)
    logging.getLogger("optuna.lightning_pipes").setLevel(logging.ERROR)
    folder, array = Path(sys.argv[1]), sys.argv[2]
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    begun: list[int] = []

    def objective(trial: BaseTrial) -> float:
        begun.append(trial.number)
        (folder / f"trial-{trial.number}-{array}.{attempt}-{rank}").touch()
        lr = trial.suggest_float("lr", 1e-4, 0.3, log=True)
        if array + attempt + rank == "000" and len(begun) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(lr, epochs=2, devices=2)

    def make() -> optuna.Study:
        return new_study(storage=open_storage(f"{folder}/study.log"), study_name="s", load_if_exists=True)

    optimize_array(make, objective, TRIALS, 2)
