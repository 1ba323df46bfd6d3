"""The ranks of a run, the layers on each of them, and their collectives outside of the pipeline."""
