"""Settings of `hydra/launcher=job_array` and `hydra/sweeper=optuna`.

A mistyped key or a wrong type raises an error before any job starts. This module does not import torch or Optuna,
because Hydra loads it at the start of every app in the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

_PLUGIN_PACKAGE = "hydra_plugins.lightning_pipes"


@dataclass
class JobArraySettings:
    """The jobs of a multirun run as siblings that share one pipeline."""

    _target_: str = f"{_PLUGIN_PACKAGE}.job_array.JobArrayLauncher"
    array_size: Any = 4  # jobs at a time; twice the number of stages keeps all busy; auto: as `memory` allows
    memory: Any = None  # arguments of MemorySwap, such as {device_bytes: 8000000000}; null: states stay on devices


@dataclass
class OptunaSettings:
    """A search with Optuna.

    The search space is given by sweeps, such as `optimizer.lr=tag(log,interval(1e-4,1e-1))`.
    """

    _target_: str = f"{_PLUGIN_PACKAGE}.optuna_sweeper.OptunaSweeper"
    _recursive_: bool = False
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"sampler": "tpe"}, {"pruner": "none"}])
    sampler: Any = MISSING
    pruner: Any = MISSING
    direction: Any = "minimize"  # or maximize, or a list with one direction per value that the job returns
    storage: str | None = None  # a URL such as sqlite:///study.db, or a journal file such as study.log; null: in memory
    study_name: str | None = None
    n_trials: int = 20  # includes trials that ended in earlier runs of the study
    timeout: float | None = None  # seconds after which no trial is started
    max_failure_rate: float = 0.0  # share of ended trials; above it, no further trial is started
    reuse: bool = False  # whether a trial takes over the values of a finished one with equal parameters
    params: dict[str, Any] = field(default_factory=dict)  # sweeps; sweeps on the command line take precedence
    custom_search_space: str | None = None  # dotted path of a function (overrides, trial) that suggests more


@dataclass
class SamplerSettings:
    """A sampler of Optuna."""

    _target_: str = MISSING
    seed: int | None = None  # equal seeds give equal trials; a resumed study draws other trials


@dataclass
class TPESettings(SamplerSettings):
    _target_: str = "optuna.samplers.TPESampler"
    n_startup_trials: int = 10
    multivariate: bool | None = None
    group: bool = False
    constant_liar: bool = True


@dataclass
class GPSettings(SamplerSettings):
    _target_: str = "optuna.samplers.GPSampler"
    n_startup_trials: int = 10
    deterministic_objective: bool = False


@dataclass
class CmaEsSettings(SamplerSettings):
    """CMA-ES, which needs `pip install cmaes`."""

    _target_: str = "optuna.samplers.CmaEsSampler"
    n_startup_trials: int = 1
    sigma0: float | None = None
    popsize: int | None = None
    with_margin: bool = False


@dataclass
class BoTorchSettings(SamplerSettings):
    """Bayesian optimization by BoTorch, which needs `pip install optuna-integration[botorch]`."""

    _target_: str = "optuna.integration.BoTorchSampler"
    n_startup_trials: int = 10


@dataclass
class NSGAIISettings(SamplerSettings):
    _target_: str = "optuna.samplers.NSGAIISampler"
    population_size: int = 50


@dataclass
class RandomSettings(SamplerSettings):
    _target_: str = "optuna.samplers.RandomSampler"


@dataclass
class QMCSettings(SamplerSettings):
    _target_: str = "optuna.samplers.QMCSampler"
    qmc_type: str = "sobol"  # or halton
    scramble: bool = False


@dataclass
class BruteForceSettings(SamplerSettings):
    """Each combination of values is tried once."""

    _target_: str = "optuna.samplers.BruteForceSampler"


@dataclass
class NoPrunerSettings:
    _target_: str = "optuna.pruners.NopPruner"


@dataclass
class MedianSettings:
    _target_: str = "optuna.pruners.MedianPruner"
    n_startup_trials: int = 5
    n_warmup_steps: int = 0
    interval_steps: int = 1


@dataclass
class HyperbandSettings:
    _target_: str = "optuna.pruners.HyperbandPruner"
    min_resource: int = 1
    max_resource: Any = "auto"
    reduction_factor: int = 3


@dataclass
class SuccessiveHalvingSettings:
    """The asynchronous successive halving algorithm (ASHA)."""

    _target_: str = "optuna.pruners.SuccessiveHalvingPruner"
    min_resource: Any = "auto"
    reduction_factor: int = 4
    min_early_stopping_rate: int = 0


SAMPLERS: dict[str, type] = {
    "tpe": TPESettings,
    "gp": GPSettings,
    "cmaes": CmaEsSettings,
    "botorch": BoTorchSettings,
    "nsgaii": NSGAIISettings,
    "random": RandomSettings,
    "qmc": QMCSettings,
    "brute_force": BruteForceSettings,
}
PRUNERS: dict[str, type] = {
    "none": NoPrunerSettings,
    "median": MedianSettings,
    "hyperband": HyperbandSettings,
    "asha": SuccessiveHalvingSettings,
}


def register_launcher() -> None:
    """Add `hydra/launcher=job_array` to Hydra's config store."""
    _store("hydra/launcher", {"job_array": JobArraySettings})


def register_sweeper() -> None:
    """Add `hydra/sweeper=optuna`, its samplers and its pruners to Hydra's config store."""
    _store("hydra/sweeper", {"optuna": OptunaSettings})
    _store("hydra/sweeper/sampler", SAMPLERS)
    _store("hydra/sweeper/pruner", PRUNERS)


def _store(group: str, nodes: dict[str, type]) -> None:
    for name, node in nodes.items():
        ConfigStore.instance().store(group=group, name=name, node=node, provider="lightning_pipes")
