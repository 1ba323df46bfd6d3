"""A run as one HTML page that needs nothing else: it opens from a file, without a network."""

from lightning_pipes.sim.page.page import SimulatedAdvice, SimulatedOption, page

__all__ = ["SimulatedAdvice", "SimulatedOption", "page"]
