"""The solvers for the order of one iteration of an array, their lower bounds, and the inner loops that they share."""
