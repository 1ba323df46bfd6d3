"""Ranks, the layers on each of them, and their collectives outside of the pipeline."""
