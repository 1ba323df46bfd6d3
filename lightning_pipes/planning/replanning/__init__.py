"""Replanning while training goes on: observations of the running plan, and times of other plans."""

from lightning_pipes.planning.replanning.interference import HostedStage, Interference, Predicted
from lightning_pipes.planning.replanning.probe import GradientSample
from lightning_pipes.planning.replanning.seen import MAX_OBSERVATIONS, Observation

__all__ = ["MAX_OBSERVATIONS", "HostedStage", "Interference", "Predicted", "GradientSample", "Observation"]
