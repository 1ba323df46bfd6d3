"""Runs the trials of Optuna studies as siblings of a job array."""
