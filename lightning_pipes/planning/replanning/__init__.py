"""Replanning while training goes on: observations of the running plan, and times of other plans."""

from lightning_pipes.planning.replanning.seen import (
    MAX_OBSERVATIONS,
    GradientSample,
    HostedStage,
    Interference,
    Observation,
    Predicted,
)

__all__ = ["MAX_OBSERVATIONS", "HostedStage", "Interference", "Predicted", "GradientSample", "Observation"]
