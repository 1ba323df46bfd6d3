"""Optuna studies whose trials are the siblings of a job array."""
