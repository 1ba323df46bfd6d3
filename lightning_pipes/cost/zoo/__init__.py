"""Named models and devices, and formulas for the costs of the models' layers on the devices."""

from lightning_pipes.cost.zoo.models import MODELS, ZooModel, named_model
from lightning_pipes.cost.zoo.profiles import CHIPS, VALUES_PER_PARAMETER, Chip, named_profile

__all__ = ["CHIPS", "MODELS", "VALUES_PER_PARAMETER", "Chip", "ZooModel", "named_model", "named_profile"]
