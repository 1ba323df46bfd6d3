"""Samples of a rank's device and machine, taken while it trains: what else happens there."""
