"""Pipelines and job arrays on a Ray cluster. `pip install lightning-pipes[ray]` installs what this package needs."""

try:
    import ray.train.lightning  # noqa: F401 - `ray` is Ray, because imports are absolute
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lightning_pipes.ray needs Ray, which can't be imported: {error}. Install it with `pip install "
        "lightning-pipes[ray]` on every machine of the cluster",
        name=error.name,
    ) from error

from lightning_pipes.ray.arrays import run_arrays
from lightning_pipes.ray.strategy import RayPipelineStrategy, prepare_trainer

__all__ = ["RayPipelineStrategy", "prepare_trainer", "run_arrays"]
