"""Models without a container of layers, cut between the units of their steps."""
