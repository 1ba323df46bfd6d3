"""The loops of the simulator, which work on numbers only."""
