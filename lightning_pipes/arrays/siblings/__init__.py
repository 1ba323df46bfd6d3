"""Siblings of a job array, and their coordination with the same siblings on other ranks."""
