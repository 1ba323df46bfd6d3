"""Everything that orders one iteration of an array, the bounds on how good that is, and the loops they share."""
