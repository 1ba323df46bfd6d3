"""Streams of subnets in virtual time, on spaces of the paper's shapes."""
