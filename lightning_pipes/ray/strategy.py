"""The strategy for processes that Ray has started."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import ray
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from ray.train.lightning import RayTrainReportCallback
from ray.train.lightning import prepare_trainer as prepare_trainer_of_ray
from ray.train.torch import get_device

from lightning_pipes.arrays.siblings.sibling import current_sibling
from lightning_pipes.ir import InputError
from lightning_pipes.trainer import PipelineStrategy
from lightning_pipes.trainer import private_lightning as private


class RayPipelineStrategy(PipelineStrategy):
    """A PipelineStrategy whose ranks are processes of Ray: the workers of a `TorchTrainer`, or the ranks of an array.

    It has the arguments of PipelineStrategy. Leave `devices` of the Trainer at "auto". The number of ranks, and the
    device of each rank, are the ones that Ray has chosen. `plugins=[RayLightningEnvironment()]` is allowed, but not
    necessary.
    """

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """The environment that numbers the processes.

        Environments that the Trainer sets, such as SLURM's if Ray runs on it, are replaced.
        """
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = None if environment is None else _RayEnvironment()

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device: torch.device = get_device() if _is_train_worker() else self.parallel_devices[0]
        return device

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node."""
        return int(os.environ["LOCAL_WORLD_SIZE"])

    def set_world_ranks(self) -> None:
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise InputError(
                "RayPipelineStrategy trains in processes that Ray has started together, and this process is not one of "
                "them. Pass the function that creates the Trainer to ray.train.torch.TorchTrainer, or pass an "
                "objective to lightning_pipes.ray.run_arrays. Without Ray, use PipelineStrategy"
            )
        super().set_world_ranks()


class _RayEnvironment(LightningEnvironment):
    """The environment of processes of Ray.

    In contrast to `RayLightningEnvironment`, it reads environment variables, which also exist outside of Ray Train.
    """

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """Do nothing, because Ray has chosen the size."""

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because Ray has chosen the rank."""

    def teardown(self) -> None:
        """Keep the variables for the next Trainer."""


def _is_train_worker() -> bool:
    """Return whether Ray Train has started this process."""
    try:
        ray.train.get_context()
    except RuntimeError:
        return False
    return True


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Check that a Trainer can train in processes of Ray, and return it.

    This function replaces `ray.train.lightning.prepare_trainer`, which refuses pipelines. It passes Trainers with other
    strategies on to that function.

    Args:
        trainer: the Trainer, before `fit`.

    Raises:
        InputError: the strategy is a PipelineStrategy for other launchers, or runs of a job array would report to Ray
            Train, which has one result for all of them.
    """
    if not isinstance(trainer.strategy, PipelineStrategy):
        prepared: pl.Trainer = prepare_trainer_of_ray(trainer)
        return prepared
    if not isinstance(trainer.strategy, RayPipelineStrategy):
        raise InputError(
            f"the Trainer has {trainer.strategy!r}, which takes the number of processes from `devices`. In processes "
            "of Ray, use lightning_pipes.ray.RayPipelineStrategy with the same arguments"
        )
    if current_sibling() is not None and any(isinstance(c, RayTrainReportCallback) for c in private.callbacks(trainer)):
        raise InputError(
            "the Trainer has a RayTrainReportCallback, but Ray Train has one result for all runs of a job array, and "
            "one folder for their checkpoints. Remove this callback. Report to a study with OptunaPruning, and save "
            "checkpoints with ModelCheckpoint in one folder for each trial"
        )
    return trainer
