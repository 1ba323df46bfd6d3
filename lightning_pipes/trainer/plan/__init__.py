"""Decisions before training: measured, planned, told all ranks."""
