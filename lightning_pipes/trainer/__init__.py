"""Pipelines as a strategy of PyTorch Lightning's Trainer."""

from lightning_pipes.trainer.callbacks.schedule_tuner import ScheduleTuner
from lightning_pipes.trainer.callbacks.timeline_logger import TimelineLogger
from lightning_pipes.trainer.registration import register_names
from lightning_pipes.trainer.reports.report import PipelineReport
from lightning_pipes.trainer.step.hooks import on_every_stage
from lightning_pipes.trainer.strategy import PipelineStrategy

__all__ = ["PipelineReport", "PipelineStrategy", "ScheduleTuner", "TimelineLogger", "on_every_stage"]

register_names()
