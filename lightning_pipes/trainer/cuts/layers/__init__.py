"""Modules that are cut in the layers of a container."""
