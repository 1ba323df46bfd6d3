"""Pipelines as a strategy of PyTorch Lightning's Trainer."""

from lightning_pipes.trainer.callbacks.schedule_tuner import ScheduleTuner
from lightning_pipes.trainer.callbacks.timeline_logger import TimelineLogger
from lightning_pipes.trainer.registration import register_names
from lightning_pipes.trainer.reports.report import PipelineReport
from lightning_pipes.trainer.strategy import PipelineStrategy

__all__ = ["PipelineReport", "PipelineStrategy", "ScheduleTuner", "TimelineLogger"]

register_names()
