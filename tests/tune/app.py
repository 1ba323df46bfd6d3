"""A small Hydra app: `python -m tests.tune.app -m lr=0.1,0.01 hydra/launcher=job_array`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from tests.tune.sweep import fit

log = logging.getLogger(__name__)


@dataclass
class Settings:
    lr: float = 0.01
    batch: int = 10
    width: int = 6
    epochs: int = 2
    devices: int = 2
    fail: str = ""


ConfigStore.instance().store(name="app", node=Settings)


@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(cfg: Settings) -> float:
    job = HydraConfig.get().job.num
    log.info("job %s starts with lr %s", job, cfg.lr)
    if cfg.fail == "value":
        raise ValueError(f"job {job} fails")
    if cfg.fail == "exit":
        raise SystemExit("leaves")
    loss = fit(cfg.lr, cfg.batch, cfg.epochs, cfg.width, cfg.devices)
    log.info("job %s ends with %r", HydraConfig.get().job.num, loss)
    assert HydraConfig.get().runtime.output_dir.endswith(f"{os.sep}{job}")
    return loss


def custom(overrides: list[str], trial: object) -> None:
    """Add a parameter to the search space if an earlier choice allows it."""
    if any(o.startswith("batch=5") for o in overrides):
        trial.suggest_int("epochs", 1, 2)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
