"""Pipelines as a strategy of PyTorch Lightning's Trainer."""

from lightning_pipes.trainer.hooks import on_every_stage
from lightning_pipes.trainer.registration import register_names
from lightning_pipes.trainer.report import PipelineReport
from lightning_pipes.trainer.schedule_tuner import ScheduleTuner
from lightning_pipes.trainer.strategy import PipelineStrategy
from lightning_pipes.trainer.timeline_logger import TimelineLogger

__all__ = ["PipelineReport", "PipelineStrategy", "ScheduleTuner", "TimelineLogger", "on_every_stage"]

register_names()
