"""Supernets: networks of which each batch trains one path, many batches at once, as if one after another."""

from lightning_pipes.supernets.bulks import in_bulks
from lightning_pipes.supernets.costs import measured_costs
from lightning_pipes.supernets.evolution import Evolution
from lightning_pipes.supernets.explorers import Explorer, Listed, Produced, Several, Uniform
from lightning_pipes.supernets.explores import Explores
from lightning_pipes.supernets.layers import ChoiceBlock, Shared
from lightning_pipes.supernets.optuna_search import OptunaExplorer
from lightning_pipes.supernets.stream import SubnetStream
from lightning_pipes.supernets.subnet import Space, Subnet
from lightning_pipes.supernets.supernet import Supernet

__all__ = [
    "ChoiceBlock",
    "Evolution",
    "Explorer",
    "Explores",
    "Listed",
    "OptunaExplorer",
    "Produced",
    "Several",
    "Shared",
    "Space",
    "Subnet",
    "SubnetStream",
    "Supernet",
    "Uniform",
    "in_bulks",
    "measured_costs",
]
