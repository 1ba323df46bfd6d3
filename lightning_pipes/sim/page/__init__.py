"""A run as one HTML page that needs nothing else: it opens from a file, without a network."""

from lightning_pipes.sim.page.page import Finding, Simulated, page

__all__ = ["Finding", "Simulated", "page"]
