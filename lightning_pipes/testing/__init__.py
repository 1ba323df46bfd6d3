"""Test helpers for built-in and third-party schedules.

They include a conformance suite, generated planning problems, reference gradients, and ranks that run as processes.
"""
