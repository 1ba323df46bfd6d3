"""Prediction of the slowdown of a stage by neighbors, from monitored values of its device."""

from lightning_pipes.strategies.dynpipe.interference.forest import Forest
from lightning_pipes.strategies.dynpipe.interference.predictor import Predictor

__all__ = ["Forest", "Predictor"]
