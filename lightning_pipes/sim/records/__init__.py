"""Comparing, saving and drawing timelines."""
