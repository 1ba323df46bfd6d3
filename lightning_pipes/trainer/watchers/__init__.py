"""Checks, statistics and safety nets beside the step: one watcher each."""
