"""How much neighbours slow a stage down, predicted from what a monitor sees of the device that would host it."""

from lightning_pipes.strategies.dynpipe.interference.forest import Forest
from lightning_pipes.strategies.dynpipe.interference.predictor import Predictor
from lightning_pipes.strategies.dynpipe.interference.refit import Refitted

__all__ = ["Forest", "Predictor", "Refitted"]
