"""Loops of the simulator, on numbers."""
