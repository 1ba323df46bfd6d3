"""Callbacks of ours."""
