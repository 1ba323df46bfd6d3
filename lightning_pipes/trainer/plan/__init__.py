"""Decisions before training, which are made from measurements and broadcast to all ranks."""
