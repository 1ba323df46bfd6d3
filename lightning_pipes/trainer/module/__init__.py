"""The user's module in a pipeline: the cut into layers, the weights, batches and optimizers, and their checks."""
