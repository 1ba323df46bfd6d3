"""DynPipe: asynchronous 1F1B that moves layers away from slow devices during training."""

from lightning_pipes.planning.replanning import GradientSample
from lightning_pipes.planning.staleness import Constants, Iterations
from lightning_pipes.strategies.dynpipe.meshes import Pricing
from lightning_pipes.strategies.dynpipe.planner import DynPlanner
from lightning_pipes.strategies.dynpipe.schedule import DynPipe
from lightning_pipes.strategies.dynpipe.stage_search import choose_stages

__all__ = [
    "Constants",
    "DynPipe",
    "DynPlanner",
    "Iterations",
    "Pricing",
    "GradientSample",
    "choose_stages",
]
