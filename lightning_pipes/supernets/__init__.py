"""Supernets: each batch trains one path through the network.

In a pipeline, many batches overlap, but the result is the same as if they were trained one after another.
"""

from lightning_pipes.supernets.explorers import (
    Evolution,
    Explorer,
    FromIterable,
    FromList,
    OptunaExplorer,
    RoundRobin,
    Uniform,
)
from lightning_pipes.supernets.layers import ChoiceBlock, SharedLayer
from lightning_pipes.supernets.stream import ExplorerFeedback, SubnetStream
from lightning_pipes.supernets.subnet import SearchSpace, Subnet
from lightning_pipes.supernets.supernet import Supernet, bulk_synchronous, measure_layer_costs

__all__ = [
    "ChoiceBlock",
    "Evolution",
    "Explorer",
    "ExplorerFeedback",
    "FromList",
    "OptunaExplorer",
    "FromIterable",
    "RoundRobin",
    "SharedLayer",
    "SearchSpace",
    "Subnet",
    "SubnetStream",
    "Supernet",
    "Uniform",
    "bulk_synchronous",
    "measure_layer_costs",
]
