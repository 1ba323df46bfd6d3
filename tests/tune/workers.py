"""A Hydra app whose jobs each run one array of a study: `python -m tests.tune.workers -m hydra/launcher=joblib`."""

from __future__ import annotations

import subprocess
import sys

import hydra
from omegaconf import DictConfig

from tests.tune.sweep import fit


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> None:
    """Run an array on the study in `cfg.folder`, or train in this process if there is no folder."""
    if cfg.folder:
        subprocess.run([sys.executable, "-m", "tests.tune.sweep", cfg.folder], check=True)
    else:
        fit(0.1, devices=2)


if __name__ == "__main__":
    main()
