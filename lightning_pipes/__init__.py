"""Pipeline parallelism for PyTorch Lightning.

Importing this package imports neither torch nor lightning, because Hydra loads the plugins of this package whenever an
app starts in the same environment. Public names are imported on first use. The strategies are registered when Lightning
is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pipes.import_hook import load_trainer_with_lightning

if TYPE_CHECKING:
    from lightning_pipes.arrays.array import JobArray
    from lightning_pipes.arrays.memory_swap import MemorySwap
    from lightning_pipes.trainer import PipelineStrategy, ScheduleTuner, TimelineLogger
    from lightning_pipes.trainer.callbacks.gradient_probe import GradientProbe
    from lightning_pipes.trainer.callbacks.interference_monitor import InterferenceMonitor
    from lightning_pipes.trainer.callbacks.reproducibility_log import ReproducibilityLog
    from lightning_pipes.trainer.checkpoint.export import export_weights
    from lightning_pipes.trainer.checkpoint.sharded import consolidate
    from lightning_pipes.trainer.weights.pretrained import load_pretrained
    from lightning_pipes.tune.studies.reporting import OptunaPruning
    from lightning_pipes.tune.studies.study import optimize_array

_WHERE = {
    "GradientProbe": "lightning_pipes.trainer.callbacks.gradient_probe",
    "InterferenceMonitor": "lightning_pipes.trainer.callbacks.interference_monitor",
    "JobArray": "lightning_pipes.arrays.array",
    "MemorySwap": "lightning_pipes.arrays.memory_swap",
    "OptunaPruning": "lightning_pipes.tune.studies.reporting",
    "PipelineStrategy": "lightning_pipes.trainer",
    "ReproducibilityLog": "lightning_pipes.trainer.callbacks.reproducibility_log",
    "ScheduleTuner": "lightning_pipes.trainer",
    "TimelineLogger": "lightning_pipes.trainer",
    "consolidate": "lightning_pipes.trainer.checkpoint.sharded",
    "export_weights": "lightning_pipes.trainer.checkpoint.export",
    "load_pretrained": "lightning_pipes.trainer.weights.pretrained",
    "optimize_array": "lightning_pipes.tune.studies.study",
}

__all__ = [
    "GradientProbe",
    "InterferenceMonitor",
    "JobArray",
    "MemorySwap",
    "OptunaPruning",
    "PipelineStrategy",
    "ReproducibilityLog",
    "ScheduleTuner",
    "TimelineLogger",
    "consolidate",
    "export_weights",
    "load_pretrained",
    "optimize_array",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


load_trainer_with_lightning()
