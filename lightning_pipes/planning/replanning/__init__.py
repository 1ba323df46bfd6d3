"""Another plan while training goes on: what was seen of the one that runs, and what others would take."""

from lightning_pipes.planning.replanning.interference import Hosting, Interference, Predicted
from lightning_pipes.planning.replanning.probe import Probe
from lightning_pipes.planning.replanning.seen import KEPT_LOOKS, Seen

__all__ = ["KEPT_LOOKS", "Hosting", "Interference", "Predicted", "Probe", "Seen"]
