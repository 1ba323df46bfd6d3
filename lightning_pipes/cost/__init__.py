"""The costs of a plan: seconds and bytes of stages and links. Numbers only; who runs when is `sim`'s business."""

from lightning_pipes.cost.cluster import FREE, Cluster, Device, Link
from lightning_pipes.cost.deployment import Deployment
from lightning_pipes.cost.model import CostModel, Costs, Recorded, Table
from lightning_pipes.cost.profile import LayerProfile, ModelProfile

__all__ = [
    "FREE",
    "Cluster",
    "CostModel",
    "Costs",
    "Deployment",
    "Device",
    "LayerProfile",
    "Link",
    "ModelProfile",
    "Recorded",
    "Table",
]
