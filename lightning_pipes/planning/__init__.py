"""Plans: which layers go to which stage. Numbers only, no torch."""
