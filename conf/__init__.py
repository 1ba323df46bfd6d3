"""Hydra configuration, reached as pkg://lightning_pipes.conf."""
