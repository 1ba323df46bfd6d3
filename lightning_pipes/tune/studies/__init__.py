"""Optuna studies with trials that run as siblings of a job array."""
