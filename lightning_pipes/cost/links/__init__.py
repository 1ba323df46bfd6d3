"""Links: how messages move, and what ranks and wires do meanwhile."""
