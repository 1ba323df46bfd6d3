"""Costs of a plan: the seconds and bytes of its stages and links.

The order of execution is simulated in the package `sim`.
"""

from lightning_pipes.cost.cluster import Cluster, Device
from lightning_pipes.cost.deployment import Deployment
from lightning_pipes.cost.job_costs import JobCosts
from lightning_pipes.cost.layer import LayerProfile, Table
from lightning_pipes.cost.links import FREE_LINK, Link, Regime
from lightning_pipes.cost.measurement import RecordedTimeline
from lightning_pipes.cost.model import CostModel, Costs
from lightning_pipes.cost.profile import ModelProfile

__all__ = [
    "FREE_LINK",
    "Cluster",
    "CostModel",
    "Costs",
    "Deployment",
    "Device",
    "JobCosts",
    "LayerProfile",
    "Link",
    "ModelProfile",
    "RecordedTimeline",
    "Regime",
    "Table",
]
