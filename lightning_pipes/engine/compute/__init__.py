"""The computations of one rank."""
