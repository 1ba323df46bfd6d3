"""Benchmarks. This package is not installed."""
