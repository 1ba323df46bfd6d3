"""Watchers: checks, statistics and safeguards of the training step, one class each."""
