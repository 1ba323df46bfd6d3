"""Modules that are cut by units."""
