"""Computations of one rank."""
