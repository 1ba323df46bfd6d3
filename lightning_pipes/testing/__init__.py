"""Test helpers for our own and other schedules: conformance, generated problems, references, ranks as processes."""
