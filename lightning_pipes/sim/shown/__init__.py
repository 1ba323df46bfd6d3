"""Timelines compared, kept and drawn."""
