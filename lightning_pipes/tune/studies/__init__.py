"""Optuna studies whose trials run as siblings of a job array."""
