"""The report of a run as one self-contained HTML page, which can be opened from a file and needs no network."""

from lightning_pipes.sim.page.page import SimulatedAdvice, SimulatedOption, render_page

__all__ = ["SimulatedAdvice", "SimulatedOption", "render_page"]
