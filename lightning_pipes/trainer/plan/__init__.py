"""Decisions before training: measured, planned, broadcast to all ranks."""
